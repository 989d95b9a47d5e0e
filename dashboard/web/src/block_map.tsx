// A head's blocks on a canvas: one image pixel per block, scaled by the browser, so that a redraw costs milliseconds.

import { useEffect, useRef } from "preact/hooks";
import { toScale, type Blocks } from "./blocks";
import { cssColour, lossMap, sequentialMap, toPixel } from "./colour";
import { useTheme } from "./theme";
import type { BlockAt, View } from "./view";

export type Shown = "kept-lost" | "mass" | "kept" | "cost";

interface Props {
  blocks: Blocks;
  view: View;
  shown: Shown;
  label: string;
}

const GRID_FROM = 12; // CSS pixels per block

export function BlockMap({ blocks, view, shown, label }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const frame = useRef<HTMLDivElement>(null);
  const { dark } = useTheme();

  useEffect(() => {
    const element = canvas.current!;
    const around = frame.current!;
    const start = performance.now();
    const image = paintBlocks(blocks, shown);
    const redraw = () => draw(element, image, view);
    redraw();
    element.dataset["redrawMs"] = (performance.now() - start).toFixed(2);
    element.dataset["shown"] = shown;
    let waiting = 0;
    const later = () => {
      waiting ||= requestAnimationFrame(() => {
        waiting = 0;
        redraw();
      });
    };
    const stop = view.listen(later);
    const sized = new ResizeObserver(() => {
      resize(element, around, view.side);
      redraw();
    });
    sized.observe(around);
    return () => {
      cancelAnimationFrame(waiting);
      stop();
      sized.disconnect();
    };
  }, [blocks, shown, view, dark]);

  useEffect(() => follow(canvas.current!, view), [view]);

  return (
    <div class="block-map" ref={frame}>
      <canvas ref={canvas} tabIndex={0} role="application" aria-roledescription="block map" aria-label={label} />
    </div>
  );
}

/** One pixel per block; what is not causal stays transparent. */
export function paintBlocks({ side, mass, cost, kept }: Blocks, shown: Shown): HTMLCanvasElement {
  const image = document.createElement("canvas");
  image.width = image.height = side;
  const data = new ImageData(side, side);
  const pixels = new Uint32Array(data.data.buffer);
  const sequential = sequentialMap();
  const lost = lossMap();
  const [on, off] = [toPixel(cssColour("--kept")), toPixel(cssColour("--dropped"))];
  const codes = shown === "cost" && cost ? cost : mass;
  const scale = Uint8Array.from({ length: 256 }, (_, code) => toScale(code));
  for (let row = 0, n = 0; row < side; row++) {
    for (let column = 0; column <= row; column++, n++) {
      const at = scale[codes[n]!]!;
      pixels[row * side + column] =
        shown === "kept" ? (kept[n] ? on : off) : shown === "kept-lost" && !kept[n] ? lost[at]! : sequential[at]!;
    }
  }
  image.getContext("2d")!.putImageData(data, 0, 0);
  return image;
}

/** The largest square in the frame, a whole number of device pixels per block where that wastes little. */
function resize(canvas: HTMLCanvasElement, frame: HTMLElement, side: number): void {
  const ratio = devicePixelRatio || 1;
  const room = Math.max(64, Math.floor(frame.clientWidth * ratio));
  const whole = Math.floor(room / side) * side;
  const pixels = whole >= 0.75 * room ? whole : room;
  canvas.width = canvas.height = pixels;
  canvas.style.width = canvas.style.height = `${pixels / ratio}px`;
}

function draw(canvas: HTMLCanvasElement, image: HTMLCanvasElement, view: View): void {
  const pen = canvas.getContext("2d")!;
  const size = canvas.width;
  const ratio = devicePixelRatio || 1;
  const cell = size / view.span;
  pen.fillStyle = cssColour("--map-paper");
  pen.fillRect(0, 0, size, size);
  pen.imageSmoothingEnabled = cell < 1;
  pen.drawImage(image, view.x, view.y, view.span, view.span, 0, 0, size, size);
  if (cell >= GRID_FROM * ratio) drawGrid(pen, view, cell, size);
  if (view.at) drawPointer(pen, view, view.at, cell, size, ratio);
}

function drawGrid(pen: CanvasRenderingContext2D, view: View, cell: number, size: number): void {
  pen.strokeStyle = cssColour("--map-grid");
  pen.lineWidth = 1;
  pen.beginPath();
  for (let n = Math.ceil(view.x); n <= view.x + view.span; n++) {
    const at = Math.round((n - view.x) * cell) + 0.5;
    pen.moveTo(at, 0);
    pen.lineTo(at, size);
  }
  for (let n = Math.ceil(view.y); n <= view.y + view.span; n++) {
    const at = Math.round((n - view.y) * cell) + 0.5;
    pen.moveTo(0, at);
    pen.lineTo(size, at);
  }
  pen.stroke();
}

/** A cross through the block pointed at, and a frame around it in two colours that show on every block. */
function drawPointer(
  pen: CanvasRenderingContext2D,
  view: View,
  at: BlockAt,
  cell: number,
  size: number,
  ratio: number,
): void {
  const left = (at.column - view.x) * cell;
  const top = (at.row - view.y) * cell;
  pen.strokeStyle = cssColour("--map-cross");
  pen.lineWidth = ratio;
  pen.beginPath();
  pen.moveTo(left + cell / 2, 0);
  pen.lineTo(left + cell / 2, size);
  pen.moveTo(0, top + cell / 2);
  pen.lineTo(size, top + cell / 2);
  pen.stroke();
  const least = Math.max(cell, 7 * ratio);
  const [x, y] = [left + cell / 2 - least / 2, top + cell / 2 - least / 2];
  pen.lineWidth = (view.pinned ? 4.5 : 3.5) * ratio;
  pen.strokeStyle = cssColour("--map-paper");
  pen.strokeRect(x, y, least, least);
  pen.lineWidth = (view.pinned ? 2.5 : 1.5) * ratio;
  pen.strokeStyle = cssColour("--ink");
  pen.strokeRect(x, y, least, least);
}

/** Pointer, wheel and keys move the view. A wheel turns the page until the map has the focus, or with Ctrl. */
function follow(canvas: HTMLCanvasElement, view: View): () => void {
  const pointers = new Map<number, { x: number; y: number }>();
  let moved = 0;

  const place = (event: { clientX: number; clientY: number }) => {
    const box = canvas.getBoundingClientRect();
    const across = view.span / box.width;
    return { x: view.x + (event.clientX - box.left) * across, y: view.y + (event.clientY - box.top) * across, across };
  };
  const blockAt = (event: { clientX: number; clientY: number }): BlockAt | null => {
    const { x, y } = place(event);
    const [column, row] = [Math.floor(x), Math.floor(y)];
    return column >= 0 && row < view.side && column <= row ? { row, column } : null;
  };

  const down = (event: PointerEvent) => {
    if (event.button !== 0) return;
    pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  };
  const move = (event: PointerEvent) => {
    const last = pointers.get(event.pointerId);
    if (!last) {
      if (!view.pinned) view.point(blockAt(event));
      return;
    }
    const { across } = place(event);
    const [dx, dy] = [event.clientX - last.x, event.clientY - last.y];
    moved += Math.abs(dx) + Math.abs(dy);
    if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)![1];
      const before = Math.hypot(last.x - other.x, last.y - other.y);
      const after = Math.hypot(event.clientX - other.x, event.clientY - other.y);
      const middle = place({ clientX: (event.clientX + other.x) / 2, clientY: (event.clientY + other.y) / 2 });
      if (before > 0) view.zoomBy(after / before, middle.x, middle.y);
    } else if (moved > 4) {
      view.panBy(-dx * across, -dy * across);
    }
    pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  };
  const up = (event: PointerEvent) => {
    if (!pointers.delete(event.pointerId) || moved > 4 || event.type === "pointercancel") return;
    const at = blockAt(event);
    const again = view.pinned && at?.row === view.at?.row && at?.column === view.at?.column;
    view.pin(again ? null : at);
    if (again) view.point(at);
  };
  const leave = () => {
    if (!view.pinned && document.activeElement !== canvas) view.point(null);
  };
  const wheel = (event: WheelEvent) => {
    if (!event.ctrlKey && document.activeElement !== canvas) return;
    event.preventDefault();
    const { x, y } = place(event);
    view.zoomBy(Math.exp(-event.deltaY * (event.deltaMode === 1 ? 0.05 : 0.0018)), x, y);
  };
  const double = (event: MouseEvent) => {
    const { x, y } = place(event);
    view.zoomBy(2, x, y);
  };
  const key = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = view.at ?? { row: Math.floor(view.y + view.span / 2), column: Math.floor(view.x + view.span / 2) };
    const far = event.shiftKey ? 8 : 1;
    const to = (rows: number, columns: number) => {
      const row = Math.min(view.side - 1, Math.max(0, at.row + rows));
      const column = Math.min(row, Math.max(0, at.column + columns));
      view.point({ row, column });
      view.reveal({ row, column });
    };
    if (event.key === "ArrowUp") to(-far, 0);
    else if (event.key === "ArrowDown") to(far, 0);
    else if (event.key === "ArrowLeft") to(0, -far);
    else if (event.key === "ArrowRight") to(0, far);
    else if (event.key === "+" || event.key === "=") view.zoomBy(1.5, at.column + 0.5, at.row + 0.5);
    else if (event.key === "-") view.zoomBy(1 / 1.5, at.column + 0.5, at.row + 0.5);
    else if (event.key === "0" || event.key === "Home") view.fit();
    else if (event.key === "Enter" || event.key === " ") view.pin(view.pinned ? null : at);
    else if (event.key === "Escape") view.pin(null);
    else return;
    event.preventDefault();
  };
  // A finger scrolls the page over a map that is seen whole, and pans a map that is magnified.
  const touch = () => {
    canvas.style.touchAction = view.zoom > 1.01 ? "none" : "pan-y";
  };
  touch();

  const handlers: [string, (event: never) => void][] = [
    ["pointerdown", down],
    ["pointermove", move],
    ["pointerup", up],
    ["pointercancel", up],
    ["pointerleave", leave],
    ["wheel", wheel],
    ["dblclick", double],
    ["keydown", key],
  ];
  for (const [name, handler] of handlers) canvas.addEventListener(name, handler as EventListener, { passive: false });
  const stop = view.listen(touch);
  return () => {
    for (const [name, handler] of handlers) canvas.removeEventListener(name, handler as EventListener);
    stop();
  };
}
