// Medians with their quartiles, as SVG: lines over a number, or one row of dots per category.

import { useEffect, useRef, useState } from "preact/hooks";
import { lineColour, lineDash } from "./colour";
import { formatIn, formatNumber, formatSeconds, formatShare } from "./format";
import { useTheme } from "./theme";
import type { Maybe, Plot, PlotPoint, PlotSeries } from "./types";

interface Scale {
  at: (value: number) => number;
  ticks: number[];
}

/** The name that a legend and a reader see. */
const title = (text: string, unit: Maybe<string>) => (unit && unit !== "s" ? `${text} (${unit})` : text);

/** The legend of several plots: each series once, with a box that takes it out of all of them. */
export function Legend({
  plots,
  colourOf,
  off,
  onOff,
}: {
  plots: Plot[];
  colourOf: (name: string) => number;
  off: ReadonlySet<string>;
  onOff: (off: ReadonlySet<string>) => void;
}) {
  useTheme();
  // The title says what a plot of one series shows.
  const compared = plots.filter(({ series }) => series.length > 1);
  const all = new Map(compared.flatMap(({ series }) => series.map((one): [string, PlotSeries] => [one.name, one])));
  const toggle = (name: string) => {
    const next = new Set(off);
    if (!next.delete(name)) next.add(name);
    onOff(next);
  };
  if (all.size === 0) return null;
  return (
    <ul class="legend of-charts">
      {[...all.values()]
        .sort((a, b) => colourOf(a.name) - colourOf(b.name))
        .map(({ name, role }) => (
          <li key={name}>
            <label class={off.has(name) ? "off" : ""}>
              <input type="checkbox" checked={!off.has(name)} onChange={() => toggle(name)} />
              <Mark n={colourOf(name)} />
              {name}
              {role === "reference" ? " (reference)" : ""}
            </label>
          </li>
        ))}
    </ul>
  );
}

export function SpreadPlot({
  plot,
  colourOf,
  off,
}: {
  plot: Plot;
  colourOf: (name: string) => number;
  off: ReadonlySet<string>;
}) {
  useTheme();
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  const [read, setRead] = useState<string | null>(null);
  useEffect(() => {
    const element = box.current!;
    const sized = new ResizeObserver(() => setWidth(element.clientWidth));
    sized.observe(element);
    return () => sized.disconnect();
  }, []);
  const shown = plot.series.filter(({ name }) => !off.has(name));
  const better = plot.y.better ? `${plot.y.better} is better` : null;
  const Body = plot.kind === "line" ? LineBody : RowBody;
  return (
    <figure class="chart spread" id={plot.id}>
      <figcaption>
        <span class="chart-title">{plot.title}</span>
        <span class="unit">{[title(plot.y.title, plot.y.unit), better].filter(Boolean).join(", ")}</span>
      </figcaption>
      <div ref={box} onPointerLeave={() => setRead(null)}>
        {width > 0 ? <Body plot={plot} series={shown} width={width} colourOf={colourOf} onRead={setRead} /> : null}
      </div>
      <p class="readings" aria-live="polite">
        {read ?? " "}
      </p>
    </figure>
  );
}

interface BodyProps {
  plot: Plot;
  series: PlotSeries[];
  width: number;
  colourOf: (name: string) => number;
  onRead: (text: string) => void;
}

function describe(plot: Plot, series: PlotSeries, point: PlotPoint): string {
  const x = plot.x.categories ? plot.x.categories[point.x] : `${plot.x.title} ${formatIn(plot.x.unit, point.x)}`;
  const spread =
    point.low !== null && point.low !== undefined
      ? `, ${formatIn(plot.y.unit, point.low)} to ${formatIn(plot.y.unit, point.high)}`
      : "";
  const rounds = point.n ? `, ${point.n} rounds` : "";
  return `${series.name}, ${x}: ${formatIn(plot.y.unit, point.y)}${spread}${rounds}`;
}

function LineBody({ plot, series, width, colourOf, onRead }: BodyProps) {
  const height = Math.min(320, Math.max(220, width * 0.55));
  const edge = { left: 62, right: 12, top: 8, bottom: 36 };
  const points = series.flatMap((one) => one.points);
  const x = makeScale(
    points.map((p) => p.x),
    edge.left,
    width - edge.right,
    plot.x.log,
    0.03,
  );
  const y = makeScale(values(points), height - edge.bottom, edge.top, plot.y.log, 0.06);
  return (
    <svg width={width} height={height} role="img" aria-label={`${plot.title}: ${plot.y.title} over ${plot.x.title}`}>
      {y.ticks.map((tick) => (
        <g key={tick}>
          <line class="grid" x1={edge.left} x2={width - edge.right} y1={y.at(tick)} y2={y.at(tick)} />
          <text class="tick end" x={edge.left - 6} y={y.at(tick) + 4}>
            {tickText(plot.y.unit, tick)}
          </text>
        </g>
      ))}
      {thin(x.ticks, Math.max(2, Math.floor((width - 80) / 52))).map((tick) => (
        <g key={tick}>
          <line class="grid" x1={x.at(tick)} x2={x.at(tick)} y1={edge.top} y2={height - edge.bottom} />
          <text class="tick middle" x={x.at(tick)} y={height - edge.bottom + 16}>
            {tickText(plot.x.unit, tick)}
          </text>
        </g>
      ))}
      <text class="tick middle" x={(edge.left + width - edge.right) / 2} y={height - 4}>
        {title(plot.x.title, plot.x.unit)}
      </text>
      {series.map((one) => {
        const n = colourOf(one.name);
        const known = one.points.filter((p) => p.y !== null && (!plot.y.log || p.y > 0)).sort((a, b) => a.x - b.x);
        const path = known.map((p, i) => `${i ? "L" : "M"}${x.at(p.x).toFixed(1)},${y.at(p.y!).toFixed(1)}`).join("");
        return (
          <g key={one.name} stroke={lineColour(n)} fill={lineColour(n)}>
            <path
              d={path}
              fill="none"
              stroke-width={one.role === "ours" ? 2.5 : 1.5}
              stroke-dasharray={one.role === "reference" ? "6 4" : lineDash(n).join(" ")}
            />
            {known.map((p) => (
              <g key={p.x} class="point" tabIndex={-1} onPointerEnter={() => onRead(describe(plot, one, p))}>
                <Whisker
                  a={p.low}
                  b={p.high}
                  log={plot.y.log}
                  line={(low, high) => ({ x1: x.at(p.x), x2: x.at(p.x), y1: y.at(low), y2: y.at(high) })}
                />
                <Shape n={n} x={x.at(p.x)} y={y.at(p.y!)} size={one.role === "ours" ? 4.5 : 3.5} />
                <circle class="reach" cx={x.at(p.x)} cy={y.at(p.y!)} r={10} />
                <title>{describe(plot, one, p)}</title>
              </g>
            ))}
          </g>
        );
      })}
    </svg>
  );
}

/** A row per category, a line of it per series: dots, because a bar on a log scale has no honest length. */
function RowBody({ plot, series, width, colourOf, onRead }: BodyProps) {
  const categories = plot.x.categories ?? [];
  const room = Math.max(60, ...categories.map((category) => category.length * 6.8)) + 14;
  const narrow = room > 0.42 * width; // then a label stands above its row
  const rowHeight = Math.max(19, series.length * 11 + 8) + (narrow ? 16 : 0);
  const edge = { left: narrow ? 8 : room, right: 24, top: 4, bottom: 26 };
  const height = edge.top + edge.bottom + rowHeight * categories.length;
  const points = series.flatMap((one) => one.points);
  const x = makeScale(values(points), edge.left + 8, width - edge.right, plot.y.log, 0.04);
  return (
    <svg width={width} height={height} role="img" aria-label={`${plot.title}: ${plot.y.title} by ${plot.x.title}`}>
      {thin(x.ticks, Math.max(2, Math.floor((width - edge.left) / 72))).map((tick) => (
        <g key={tick}>
          <line class="grid" x1={x.at(tick)} x2={x.at(tick)} y1={edge.top} y2={height - edge.bottom} />
          <text class="tick middle" x={x.at(tick)} y={height - edge.bottom + 16}>
            {tickText(plot.y.unit, tick)}
          </text>
        </g>
      ))}
      {categories.map((category, row) => {
        const top = edge.top + row * rowHeight;
        const inner = narrow ? top + 16 : top;
        return (
          <g key={row}>
            {row % 2 ? null : <rect class="stripe" x={0} y={top} width={width} height={rowHeight} />}
            <text
              class={narrow ? "label" : "label end"}
              x={narrow ? edge.left : edge.left - 6}
              y={narrow ? top + 13 : top + rowHeight / 2 + 4}
            >
              {category}
            </text>
            {series.map((one, s) => {
              const point = one.points.find((p) => p.x === row);
              const n = colourOf(one.name);
              const y = inner + ((narrow ? rowHeight - 16 : rowHeight) * (s + 0.5)) / series.length;
              if (!point || point.y === null || (plot.y.log && point.y <= 0)) return null;
              return (
                <g
                  key={one.name}
                  class="point"
                  stroke={lineColour(n)}
                  fill={lineColour(n)}
                  onPointerEnter={() => onRead(describe(plot, one, point))}
                >
                  <Whisker
                    a={point.low}
                    b={point.high}
                    log={plot.y.log}
                    line={(low, high) => ({ x1: x.at(low), x2: x.at(high), y1: y, y2: y })}
                  />
                  <Shape n={n} x={x.at(point.y)} y={y} size={one.role === "ours" ? 4.5 : 3.5} />
                  <rect class="reach" x={edge.left} y={y - 5} width={width - edge.left} height={10} />
                  <title>{describe(plot, one, point)}</title>
                </g>
              );
            })}
          </g>
        );
      })}
    </svg>
  );
}

interface Ends {
  x1: number;
  x2: number;
  y1: number;
  y2: number;
}

function Whisker({
  a,
  b,
  log,
  line,
}: {
  a: Maybe<number>;
  b: Maybe<number>;
  log: boolean;
  line: (low: number, high: number) => Ends;
}) {
  if (typeof a !== "number" || typeof b !== "number" || (log && a <= 0)) return null;
  return <line class="whisker" {...line(a, b)} />;
}

/** Six shapes for seven colours: 42 pairs before one comes again. */
function Shape({ n, x, y, size }: { n: number; x: number; y: number; size: number }) {
  const d = [
    `M${-size},0a${size},${size} 0 1,0 ${2 * size},0a${size},${size} 0 1,0 ${-2 * size},0`,
    `M${-size},${-size}h${2 * size}v${2 * size}h${-2 * size}z`,
    `M0,${-size * 1.2}L${size * 1.15},${size * 0.9}H${-size * 1.15}z`,
    `M0,${-size * 1.3}L${size * 1.3},0L0,${size * 1.3}L${-size * 1.3},0z`,
    `M0,${size * 1.2}L${size * 1.15},${-size * 0.9}H${-size * 1.15}z`,
    `M${-size * 1.2},${-size * 0.4}h${size * 0.8}v${-size * 0.8}h${size * 0.8}v${size * 0.8}h${size * 0.8}v${size * 0.8}h${-size * 0.8}v${size * 0.8}h${-size * 0.8}v${-size * 0.8}h${-size * 0.8}z`,
  ];
  return <path class="shape" d={d[n % d.length]!} transform={`translate(${x.toFixed(1)},${y.toFixed(1)})`} />;
}

function Mark({ n }: { n: number }) {
  return (
    <svg class="mark" width={22} height={12} aria-hidden="true" stroke={lineColour(n)} fill={lineColour(n)}>
      <line x1={0} x2={22} y1={6} y2={6} stroke-width={2} stroke-dasharray={lineDash(n).join(" ")} />
      <Shape n={n} x={11} y={6} size={4} />
    </svg>
  );
}

function values(points: PlotPoint[]): number[] {
  return points
    .flatMap(({ y, low, high }) => [y, low, high])
    .filter((value): value is number => typeof value === "number");
}

/** From the values' range to pixels, with ticks at round numbers. */
function makeScale(all: number[], from: number, to: number, log: boolean, pad: number): Scale {
  const usable = log ? all.filter((value) => value > 0) : all;
  let [low, high] = [Math.min(...usable), Math.max(...usable)];
  if (usable.length === 0) [low, high] = log ? [1, 10] : [0, 1];
  const warp = log ? Math.log10 : (value: number) => value;
  if (!log && low >= 0 && low < 0.5 * high) low = 0;
  if (low === high)
    [low, high] = log ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 10, high + Math.abs(high || 1) / 10];
  const [a, b] = [warp(low), warp(high)];
  const margin = (b - a) * pad;
  const [start, end] = [!log && low === 0 ? 0 : a - margin, b + margin];
  const at = (value: number) => from + ((warp(value) - start) / (end - start)) * (to - from);
  const ticks = log ? logTicks(10 ** start, 10 ** end) : roundTicks(start, end, 6);
  return { at, ticks };
}

function roundTicks(low: number, high: number, most: number): number[] {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough)!;
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++)
    ticks.push(Number((n * step).toPrecision(12)));
  return ticks;
}

function logTicks(low: number, high: number): number[] {
  const decades = Math.log10(high / low);
  if (decades < 0.3) return roundTicks(low, high, 5).filter((tick) => tick > 0);
  const steps = decades < 1 ? [1, 1.5, 2, 3, 5, 7] : decades < 2.2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const step of steps) {
      const tick = Number((step * 10 ** power).toPrecision(12));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

function thin(ticks: number[], most: number): number[] {
  const every = Math.ceil(ticks.length / most);
  return ticks.filter((_, n) => n % every === 0);
}

function tickText(unit: Maybe<string>, tick: number): string {
  if (unit === "s") return formatSeconds(tick);
  return unit === "share" ? formatShare(tick) : formatNumber(tick, 3);
}
