// Lines over a shared x on uPlot: live data, drag to zoom, a cursor that arrow keys move, readings in words below.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { cssColour } from "./colour";
import { formatNumber } from "./format";
import { useTheme } from "./theme";

export interface Line {
  name: string;
  colour: string;
  x: (number | null)[];
  y: (number | null)[];
  dash?: number[];
  /** Drawn thinly behind another line of the same name, and left out of the readings. */
  faint?: boolean;
  /** Single values far apart: marked by dots. */
  dots?: boolean;
  /** Dots alone. */
  scattered?: boolean;
  /** A value holds until the next one: drawn as steps. */
  held?: boolean;
}

interface Props {
  title: string;
  unit?: string | null | undefined;
  lines: Line[];
  xTitle: string;
  xFormat?: (x: number) => string;
  yFormat?: (y: number | null) => string;
  log?: boolean;
  /** Let a few values far away leave the frame, and say how many. */
  trim?: boolean;
  height?: number;
  range?: [number, number] | null;
  /** What x reaches over where no range is chosen; without it, over the values. */
  span?: [number, number] | null;
  onRange?: (range: [number, number] | null) => void;
  /** A vertical line at this x. */
  marker?: number | null;
  /** Charts of one group share the cursor. */
  group?: string;
}

export function Chart(props: Props) {
  const {
    title,
    unit,
    lines,
    xTitle,
    xFormat = formatNumber,
    yFormat = formatNumber,
    log = false,
    height = 220,
    range,
    marker,
  } = props;
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [cursor, setCursor] = useState<number | null>(null);
  const { dark } = useTheme();
  const data = useMemo(() => align(lines, log), [lines, log]);
  const look = lines
    .map(({ colour, dash, faint, dots, scattered, held }) => [colour, dash, faint, dots, scattered, held].join())
    .join("|");
  const kept = useMemo(() => (props.trim ? trimmed(data) : null), [data, props.trim]);
  const latest = useRef<Latest>({ ...props, kept });
  latest.current = { ...props, kept };
  const ready = data[0].length > 0 && data.slice(1).some((values) => values.some((value) => typeof value === "number"));

  useEffect(() => {
    if (!ready) return;
    const element = box.current!;
    const made = new uPlot(options(element.clientWidth, height, latest, setCursor), data, element);
    plot.current = made;
    const sized = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height }));
    sized.observe(element);
    return () => {
      sized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [ready, look, log, dark, height]);

  useEffect(() => {
    plot.current?.setData(data, true);
  }, [data]);
  useEffect(() => {
    plot.current?.setData(plot.current.data, true);
  }, [range?.[0], range?.[1], props.span?.[0], props.span?.[1], props.trim]);
  useEffect(() => plot.current?.redraw(false), [marker]);

  const key = (event: KeyboardEvent) => {
    if (plot.current && moveCursor(plot.current, event.key, latest.current)) event.preventDefault();
  };
  const last = data[0].length - 1;
  const at = cursor !== null && cursor <= last ? cursor : null;
  return (
    <figure class="chart" data-chart={title} data-points={data[0].length}>
      <figcaption>
        <span class="chart-title">{title}</span>
        {unit ? <span class="unit">{unit}</span> : null}
        {kept ? (
          <span class="unit">
            {kept.outside === 1 ? "1 far value is" : `${kept.outside} far values are`} outside the chart
          </span>
        ) : null}
      </figcaption>
      {ready ? (
        <div
          ref={box}
          class="plot"
          tabIndex={0}
          role="application"
          aria-label={`${title} over ${xTitle}`}
          aria-roledescription="chart"
          onKeyDown={key}
        />
      ) : (
        <p class="empty">No values yet.</p>
      )}
      {ready ? (
        <div class="readings" aria-live="off">
          <span class="reading-x">{at === null ? "last" : `${xTitle} ${xFormat(data[0][at] as number)}`}</span>
          {lines.map((line, n) =>
            line.faint ? null : (
              <span class="reading" key={`${line.name} ${n}`}>
                <i class={line.scattered ? "swatch dot" : "swatch"} style={{ background: line.colour }} />
                {line.name} {line.scattered ? null : <b>{yFormat(valueAt(data, n + 1, at ?? last))}</b>}
              </span>
            ),
          )}
        </div>
      ) : null}
    </figure>
  );
}

const PAD: uPlot.Range.Limit = { pad: 0.08, mode: 0 };
const FEW = 40; // values of which none counts as far away

interface Trimmed {
  range: [number, number];
  outside: number;
}
type Latest = Props & { kept: Trimmed | null };

/** The range of the middle 99% of all values, and how many lie outside; null where none is far from the rest. */
function trimmed(data: uPlot.AlignedData): Trimmed | null {
  const all = data
    .slice(1)
    .flatMap((values) => Array.from(values as (number | null)[]).filter((value) => typeof value === "number"));
  if (all.length < FEW) return null;
  all.sort((a, b) => a - b);
  const at = (share: number) => all[Math.round(share * (all.length - 1))]!;
  const [low, high] = [at(0.005), at(0.995)];
  const room = (high - low) / 2;
  const [lowest, highest] = [all[0]!, all[all.length - 1]!];
  if (lowest >= low - room && highest <= high + room) return null;
  const range: [number, number] = [lowest < low - room ? low : lowest, highest > high + room ? high : highest];
  return { range, outside: all.filter((value) => value < range[0] || value > range[1]).length };
}

/** One x for all lines, as uPlot wants it: null where a line has no value. */
function align(lines: Line[], log: boolean): uPlot.AlignedData {
  const tables = lines.map(({ x, y }): uPlot.AlignedData => {
    const xs: number[] = [];
    const ys: (number | null)[] = [];
    for (let n = 0; n < x.length; n++) {
      const at = x[n];
      const value = y[n];
      if (typeof at !== "number" || (xs.length && at <= xs[xs.length - 1]!)) continue;
      xs.push(at);
      ys.push(typeof value === "number" && Number.isFinite(value) && (!log || value > 0) ? value : null);
    }
    return [xs, ys];
  });
  if (tables.length === 0) return [[]];
  return tables.length === 1 ? tables[0]! : uPlot.join(tables);
}

/** The line's value at an index of x, or the last one before it: lines of several runs seldom share an x. */
function valueAt(data: uPlot.AlignedData, line: number, index: number): number | null {
  const values = data[line];
  if (!values) return null;
  for (let n = index; n >= 0; n--) {
    const value = values[n];
    if (typeof value === "number") return value;
  }
  return null;
}

function options(
  width: number,
  height: number,
  latest: { current: Latest },
  setCursor: (at: number | null) => void,
): uPlot.Options {
  const { lines, log, group, xFormat = formatNumber, yFormat = formatNumber } = latest.current;
  const axis: uPlot.Axis = {
    stroke: () => cssColour("--muted"),
    font: "12px system-ui, sans-serif",
    grid: { stroke: () => cssColour("--line"), width: 1 },
    ticks: { stroke: () => cssColour("--line"), width: 1, size: 4 },
  };
  return {
    width,
    height,
    padding: [10, 12, 0, 0],
    legend: { show: false },
    scales: {
      x: {
        time: false,
        range: (_, low, high) => {
          const [from, to] = latest.current.range ?? latest.current.span ?? [low, high];
          return from === to ? [from - 0.5, to + 0.5] : [from, to];
        },
      },
      y: {
        distr: log ? 3 : 1,
        range: (_, low, high) => {
          const [from, to] = latest.current.kept?.range ?? [low, high];
          return log ? uPlot.rangeLog(from, to, 10, false) : uPlot.rangeNum(from, to, { min: PAD, max: PAD });
        },
      },
    },
    axes: [
      { ...axis, space: 64, size: 30, values: (_, splits) => splits.map((x) => (x === null ? "" : xFormat(x))) },
      { ...axis, space: 34, size: 58, values: (_, splits) => tickLabels(splits, yFormat) },
    ],
    cursor: {
      ...(group ? { sync: { key: group, setSeries: false } } : {}),
      drag: { x: true, y: false, setScale: false },
      points: { size: 7 },
      y: false,
    },
    series: [
      {},
      ...lines.map((line): uPlot.Series => ({
        label: line.name,
        stroke: line.colour,
        width: line.scattered ? 0 : line.faint ? 1 : 2,
        alpha: line.faint ? 0.3 : 1,
        dash: line.dash ?? [],
        spanGaps: true,
        ...(line.scattered ? { paths: () => null } : line.held ? { paths: uPlot.paths.stepped!({ align: 1 }) } : {}),
        points: {
          show: Boolean(line.dots || line.scattered),
          size: line.scattered ? 8 : 6,
          fill: line.colour,
          width: 0,
        },
      })),
    ],
    hooks: {
      setCursor: [(u) => setCursor(u.cursor.idx ?? null)],
      setSelect: [
        (u) => {
          const { onRange } = latest.current;
          if (u.select.width > 4 && onRange)
            onRange([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
      ready: [(u) => u.over.addEventListener("dblclick", () => latest.current.onRange?.(null))],
      draw: [(u) => drawMarker(u, latest.current.marker)],
    },
  };
}

/** On a log axis uPlot gives null for lines without a label. */
function tickLabels(splits: (number | null)[], format: (y: number | null) => string): string[] {
  return splits.map((y) => (y === null ? "" : format(Number(y.toPrecision(12)))));
}

function drawMarker(u: uPlot, marker: number | null | undefined): void {
  if (marker === null || marker === undefined) return;
  const x = Math.round(u.valToPos(marker, "x", true));
  u.ctx.save();
  u.ctx.strokeStyle = cssColour("--ink");
  u.ctx.lineWidth = 1.5 * devicePixelRatio;
  u.ctx.beginPath();
  u.ctx.moveTo(x, u.bbox.top);
  u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
  u.ctx.stroke();
  u.ctx.restore();
}

/** Arrow keys move the cursor, + and - zoom about it, 0 and Escape show everything. */
function moveCursor(u: uPlot, key: string, { range, onRange }: Props): boolean {
  const xs = u.data[0];
  const scale = u.scales["x"]!;
  const [low, high] = [scale.min ?? xs[0]!, scale.max ?? xs[xs.length - 1]!];
  const at = u.cursor.idx ?? xs.length - 1;
  const to = (index: number) => {
    const bounded = Math.min(xs.length - 1, Math.max(0, index));
    u.setCursor({ left: u.valToPos(xs[bounded]!, "x"), top: u.over.clientHeight / 2 });
  };
  const stride = Math.max(1, Math.round(xs.length / 100));
  if (key === "ArrowRight") to(at + stride);
  else if (key === "ArrowLeft") to(at - stride);
  else if ((key === "+" || key === "=") && onRange) onRange([xs[at]! - (high - low) / 4, xs[at]! + (high - low) / 4]);
  else if (key === "-" && onRange && range) onRange([low - (high - low) / 2, high + (high - low) / 2]);
  else if ((key === "0" || key === "Escape") && onRange) onRange(null);
  else return false;
  return true;
}
