// What part of a block map is seen and which block is pointed at; maps side by side share one view.

import { reducedMotion } from "./theme";

export interface BlockAt {
  row: number;
  column: number;
}

const MOST = 64; // times magnified
const EASE = 0.3; // of the remaining way per frame

export class View {
  zoom = 1;
  x = 0;
  y = 0;
  at: BlockAt | null = null;
  pinned = false;
  private goal: { zoom: number; x: number; y: number } | null = null;
  private readonly listeners = new Set<() => void>();

  constructor(readonly side: number) {}

  /** Blocks seen across. */
  get span(): number {
    return this.side / this.zoom;
  }

  listen(changed: () => void): () => void {
    this.listeners.add(changed);
    return () => {
      this.listeners.delete(changed);
    };
  }

  /** Magnify by `factor` so that the block at (x, y) stays where it is on the screen. */
  zoomBy(factor: number, x: number, y: number): void {
    const from = this.goal ?? this;
    const zoom = Math.min(MOST, Math.max(1, from.zoom * factor, 1));
    const ratio = from.zoom / zoom;
    this.moveTo(zoom, x - (x - from.x) * ratio, y - (y - from.y) * ratio);
  }

  panBy(columns: number, rows: number): void {
    this.goal = null;
    [this.x, this.y] = [this.x + columns, this.y + rows];
    this.clamp(this);
    this.changed();
  }

  fit(): void {
    this.moveTo(1, 0, 0);
  }

  point(at: BlockAt | null): void {
    if (at?.row === this.at?.row && at?.column === this.at?.column) return;
    this.at = at;
    this.changed();
  }

  pin(at: BlockAt | null): void {
    this.pinned = at !== null;
    this.at = at;
    this.changed();
  }

  /** Pan just as far as is needed to see the block. */
  reveal({ row, column }: BlockAt): void {
    const margin = Math.min(2, this.span / 4);
    const inside = (start: number, at: number) => Math.min(at - margin, Math.max(start, at + 1 + margin - this.span));
    this.x = inside(this.x, column);
    this.y = inside(this.y, row);
    this.clamp(this);
    this.changed();
  }

  private moveTo(zoom: number, x: number, y: number): void {
    const goal = { zoom, x, y };
    this.clamp(goal);
    if (reducedMotion.matches) {
      Object.assign(this, goal);
      this.goal = null;
      this.changed();
    } else {
      const idle = this.goal === null;
      this.goal = goal;
      if (idle) requestAnimationFrame(this.approach);
    }
  }

  private readonly approach = (): void => {
    const goal = this.goal;
    if (!goal) return;
    const near =
      Math.abs(goal.zoom / this.zoom - 1) < 0.004 &&
      Math.abs(goal.x - this.x) + Math.abs(goal.y - this.y) < 0.01 * this.span;
    const step = near ? 1 : EASE;
    // Zoom and position move so that the fixed point of a zoom stays fixed on the way.
    const zoom = this.zoom * (goal.zoom / this.zoom) ** step;
    const way = goal.zoom === this.zoom ? step : (1 / this.zoom - 1 / zoom) / (1 / this.zoom - 1 / goal.zoom);
    this.x += (goal.x - this.x) * way;
    this.y += (goal.y - this.y) * way;
    this.zoom = zoom;
    if (near) this.goal = null;
    else requestAnimationFrame(this.approach);
    this.changed();
  };

  private clamp(at: { zoom: number; x: number; y: number }): void {
    const most = this.side - this.side / at.zoom;
    at.x = Math.min(most, Math.max(0, at.x));
    at.y = Math.min(most, Math.max(0, at.y));
  }

  private changed(): void {
    this.listeners.forEach((listener) => listener());
  }
}
