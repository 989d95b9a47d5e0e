// Training runs, live: overlaid curves, what each head keeps, and how a run was started.

import { useEffect, useMemo, useState } from "preact/hooks";
import { Chart, type Line } from "../chart";
import { lineColour, lineDash } from "../colour";
import { formatCount, formatDate, formatDuration, formatNumber, formatSeconds, formatShare } from "../format";
import { budgetMiddle, HeadGrid, ShareScale } from "../head_grid";
import { Choice, Command, Failure, Figure, Nothing, SkippedFiles, Slider, Tree, Waiting } from "../parts";
import { setQuery, type Route } from "../route";
import { type RunData, type RunStore, useRuns } from "../run_store";
import { smooth } from "../smooth";
import { useTheme } from "../theme";
import type { Curve, Maybe, Metric, RunEntry, Series } from "../types";

type Axis = "step" | "tokens" | "time";
const AXES: [Axis, string][] = [
  ["step", "Step"],
  ["tokens", "Tokens"],
  ["time", "Time"],
];
const AT_FIRST = 4; // runs drawn until the reader chooses

export function RunsPage({ route }: { route: Route }) {
  const store = useRuns();
  const { dark } = useTheme();
  const runs = store.list?.runs ?? [];
  const asked = route.query.get("on");
  const on = useMemo(() => (asked === null ? firstRuns(runs) : asked.split(",").filter(Boolean)), [asked, store.list]);
  const shownIds = on.join(",");
  useEffect(() => store.want(on), [store, shownIds]);

  const axis = (AXES.find(([name]) => name === route.query.get("x"))?.[0] ?? "step") as Axis;
  const weight = Math.min(0.99, Math.max(0, Number(route.query.get("smooth")) || 0));
  const log = route.query.get("log") === "1";
  const trim = route.query.get("far") !== "1";
  const [range, setRange] = useState<[number, number] | null>(null);
  useEffect(() => setRange(null), [axis]);
  useEffect(() => store.closeUp(range && toSteps(range, axis, store, on)), [range?.[0], range?.[1], axis, shownIds]);

  if (store.error && !store.list) return <Failure error={store.error} />;
  if (!store.list) return <Waiting what="runs" />;
  if (runs.length === 0 && on.length === 0) {
    return (
      <>
        <Nothing title="No runs yet">
          <p>
            Curves of training runs appear here while they train. Start one, in a folder that this dashboard watches:
          </p>
          <Command>xsake train --data data --run runs/first</Command>
        </Nothing>
        <SkippedFiles skipped={store.list.skipped} />
      </>
    );
  }
  // A run keeps its colour while it is shown, whatever else is.
  const colours = new Map(on.map((id, n) => [id, n]));
  const focus = route.query.get("run") ?? on[0] ?? null;
  const toggle = (id: string) =>
    setQuery({ on: (colours.has(id) ? on.filter((one) => one !== id) : [...on, id]).join(",") });
  const shown = on.map((id) => store.data.get(id));
  const metrics = allMetrics(shown);
  const span = spanOf(shown, axis);
  return (
    <div class="with-side">
      <aside class="side" aria-label="Runs">
        <h2>
          Runs <LinkState store={store} />
        </h2>
        <ul class="run-list">
          {runs.map((run) => (
            <RunRow
              key={run.id}
              run={store.data.get(run.id)?.run ?? run}
              gone={store.data.get(run.id)?.gone ?? false}
              n={colours.get(run.id)}
              focus={run.id === focus}
              onToggle={() => toggle(run.id)}
            />
          ))}
          {on
            .filter((id) => !runs.some((run) => run.id === id))
            .map((id) => {
              const data = store.data.get(id);
              return data ? (
                <RunRow
                  key={id}
                  run={data.run}
                  gone
                  n={colours.get(id)}
                  focus={id === focus}
                  onToggle={() => toggle(id)}
                />
              ) : null;
            })}
        </ul>
        <SkippedFiles skipped={store.list.skipped} />
      </aside>
      <div class="main">
        <div class="controls">
          <Choice label="Over" options={AXES} value={axis} onChange={(x) => setQuery({ x: x === "step" ? null : x })} />
          <Slider
            label="Smoothing"
            value={weight}
            min={0}
            max={0.99}
            step={0.01}
            text={weight ? weight.toFixed(2) : "off"}
            onInput={(value) => setQuery({ smooth: value || null })}
          />
          <label class="check">
            <input type="checkbox" checked={log} onChange={() => setQuery({ log: log ? null : 1 })} />
            Log scale
          </label>
          <label class="check">
            <input type="checkbox" checked={!trim} onChange={() => setQuery({ far: trim ? 1 : null })} />
            Show far values
          </label>
          {range ? (
            <button type="button" onClick={() => setRange(null)}>
              Show everything
            </button>
          ) : null}
        </div>
        {on.map((id) => (store.errors.has(id) ? <Failure key={id} error={store.errors.get(id)!} /> : null))}
        {on.length === 0 ? <p class="empty">Choose a run to see its curves.</p> : null}
        <div class="charts">
          {metrics.map((metric) => (
            <MetricChart
              key={metric.name}
              metric={metric}
              store={store}
              on={on}
              axis={axis}
              weight={weight}
              log={log}
              trim={trim}
              range={range}
              span={span}
              onRange={setRange}
              dark={dark}
            />
          ))}
        </div>
        {on.length && metrics.length ? (
          <p class="hint">
            Drag over a curve to zoom, double-click to see everything. With the keyboard: arrows read values, + and −
            zoom, 0 shows everything.
          </p>
        ) : null}
        {focus && store.data.get(focus) ? <RunDetails data={store.data.get(focus)!} /> : null}
      </div>
    </div>
  );
}

/** Running runs and the newest ones. */
function firstRuns(runs: RunEntry[]): string[] {
  const order = [...runs].sort((a, b) => Number(b.status === "running") - Number(a.status === "running"));
  return order.slice(0, AT_FIRST).map(({ id }) => id);
}

function LinkState({ store }: { store: RunStore }) {
  const words = { connecting: "connecting", live: "live", lost: "server lost, trying again", recorded: "recorded" };
  return (
    <span class={`link ${store.link}`} role="status">
      {words[store.link]}
    </span>
  );
}

function RunRow({
  run,
  gone,
  n,
  focus,
  onToggle,
}: {
  run: RunEntry;
  gone: boolean;
  n: number | undefined;
  focus: boolean;
  onToggle: () => void;
}) {
  const done = run.step !== null && run.step !== undefined && run.steps ? run.step / run.steps : null;
  const status = gone ? "deleted" : run.status;
  return (
    <li class={focus ? "focus" : ""} data-run={run.id} data-status={status}>
      <label class="run-pick">
        <input type="checkbox" checked={n !== undefined} onChange={onToggle} aria-label={`Draw ${run.name}`} />
        <i class="swatch" style={{ background: n === undefined ? "transparent" : lineColour(n) }} />
      </label>
      <button type="button" class="run-name" onClick={() => setQuery({ run: run.id })} title={run.path}>
        {run.name}
      </button>
      <span class={`status ${status}`} title={run.status_reason ?? undefined}>
        {status}
      </span>
      <div
        class="progress"
        role="progressbar"
        aria-label={`${run.name}: steps`}
        aria-valuemin={0}
        aria-valuemax={run.steps ?? undefined}
        aria-valuenow={run.step ?? undefined}
      >
        <i style={{ width: `${100 * Math.min(1, done ?? 0)}%` }} />
      </div>
      <p class="run-facts">
        <span>
          step <b data-name="step">{formatNumber(run.step)}</b>
          {run.steps ? ` of ${formatNumber(run.steps)}` : ""}
        </span>
        <span>
          loss <b data-name="loss">{formatNumber(run.loss)}</b>
        </span>
        {run.tokens_per_second ? <span>{formatCount(run.tokens_per_second)} tokens/s</span> : null}
        {typeof run.read_share === "number" ? <span>{formatShare(run.read_share, 2)} of the file read</span> : null}
        {run.status === "running" && run.remaining ? <span>{formatDuration(run.remaining)} left</span> : null}
      </p>
      {run.status_reason ? <p class={`reason ${run.status}`}>{run.status_reason}</p> : null}
    </li>
  );
}

/** The union of the runs' metrics, in the order of the first run that has them. */
function allMetrics(data: (RunData | undefined)[]): Metric[] {
  const found = new Map<string, Metric>();
  for (const one of data)
    for (const metric of one?.run.metrics ?? []) if (!found.has(metric.name)) found.set(metric.name, metric);
  return [...found.values()];
}

interface MetricChartProps {
  metric: Metric;
  store: RunStore;
  on: string[];
  axis: Axis;
  weight: number;
  log: boolean;
  trim: boolean;
  range: [number, number] | null;
  span: [number, number] | null;
  onRange: (range: [number, number] | null) => void;
  dark: boolean;
}

function MetricChart({ metric, store, on, axis, weight, log, trim, range, span, onRange, dark }: MetricChartProps) {
  const sizes = on.map((id) => `${id} ${sizeOf(store.data.get(id), metric.name)}`).join();
  const lines = useMemo(
    () => on.flatMap((id, n) => metricLines(store.data.get(id), metric.name, n, axis, weight)),
    [sizes, metric.name, axis, weight, dark],
  );
  const xFormat = axis === "time" ? formatDuration : axis === "tokens" ? formatCount : formatNumber;
  return (
    <Chart
      title={metric.title}
      unit={metric.unit}
      lines={lines}
      xTitle={axis}
      xFormat={xFormat}
      yFormat={formatOf(metric)}
      log={log && metric.log}
      trim={trim}
      range={range}
      span={span}
      onRange={onRange}
      group="runs"
    />
  );
}

function formatOf({ name, unit }: Metric): (value: number | null) => string {
  if (name === "mfu" || name === "density") return formatShare;
  if (unit === "s" || name === "seconds") return formatSeconds;
  return name === "tokens_per_second" ? formatCount : formatNumber;
}

/** Changes when a curve is loaded anew, is zoomed into or grows. */
function sizeOf(data: RunData | undefined, metric: string): string {
  const curve = (data?.detail ?? data?.series)?.series[metric];
  if (!data || !curve) return "";
  const end = metric === HELD ? data.run.step : curve.step[curve.step.length - 1];
  return `${data.detail ? "detail" : ""}${curve.step.length}@${curve.step[0]}-${end}`;
}

const HELD = "density"; // written when it changes: a value holds until the next one

/** x at every step of a curve; null where it is not known. */
function along(data: RunData, series: Series, curve: Curve, axis: Axis): (number | null)[] {
  if (axis === "step") return curve.step;
  if (axis === "time") return curve.time;
  const perStep = series.tokens_per_step ?? data.run.tokens_per_step;
  return curve.step.map((step) => (perStep ? step * perStep : null));
}

/** The first and the last x of all curves that are drawn, so that their charts lie side by side. */
function spanOf(shown: (RunData | undefined)[], axis: Axis): [number, number] | null {
  const ends = shown
    .flatMap((data) => (data ? Object.values(data.series.series).map((curve) => [data, curve] as const) : []))
    .flatMap(([data, curve]) => {
      const x = along(data, data.series, curve, axis);
      return [x[0], x[x.length - 1]];
    })
    .filter((x) => typeof x === "number");
  return ends.length ? [Math.min(...ends), Math.max(...ends)] : null;
}

function metricLines(data: RunData | undefined, metric: string, n: number, axis: Axis, weight: number): Line[] {
  const series = data?.detail ?? data?.series;
  const curve = series?.series[metric];
  if (!data || !curve) return [];
  const look = {
    name: data.run.name,
    colour: lineColour(n),
    dash: lineDash(n),
    x: [...along(data, series!, curve, axis)],
  };
  if (metric === HELD) {
    const end = spanOf([data], axis)?.[1] ?? null;
    return [{ ...look, x: [...look.x, end], y: [...curve.value, curve.value.at(-1) ?? null], held: true }];
  }
  const few = curve.step.length < 40;
  if (weight === 0 || few) return [{ ...look, y: [...curve.value], dots: few }];
  return [
    { ...look, y: [...curve.value], faint: true },
    { ...look, y: smooth(curve.value, weight) },
  ];
}

function toSteps(range: [number, number], axis: Axis, store: RunStore, on: string[]): [number, number] | null {
  if (axis === "step") return range;
  const data = on.map((id) => store.data.get(id)).find(Boolean);
  if (!data) return null;
  if (axis === "tokens") {
    const perStep = data.series.tokens_per_step;
    return perStep ? [range[0] / perStep, range[1] / perStep] : null;
  }
  const curve = data.series.series["loss"] ?? Object.values(data.series.series)[0];
  if (!curve?.step.length) return null;
  const stepAt = (time: number) => {
    const n = curve.time.findIndex((t) => t !== null && t >= time);
    return curve.step[n < 0 ? curve.step.length - 1 : n]!;
  };
  return [stepAt(range[0]), stepAt(range[1])];
}

function RunDetails({ data: { run, series } }: { data: RunData }) {
  return (
    <section class="panel" aria-label={`About ${run.name}`} data-details={run.id}>
      <h2>{run.name}</h2>
      <p class="provenance">
        <code>{run.path}</code>
        {run.environment?.["device"] ? <>, on {String(run.environment["device"])}</> : null}
        {run.started ? <>, started {formatDate(run.started)}</> : null}
        {run.last_event ? <>, last written {formatDate(run.last_event)}</> : null}
        {run.status_reason ? <>: {run.status_reason}</> : null}
      </p>
      <dl class="figures">
        <Figure name="loss" value={formatNumber(run.loss)} full={run.loss} />
        <Figure name="held-out loss" value={formatNumber(run.held_out_loss)} full={run.held_out_loss} />
        <Figure name="tokens" value={formatCount(run.tokens)} full={run.tokens} />
        <Figure name="tokens/s" value={formatCount(run.tokens_per_second)} full={run.tokens_per_second} />
        <Figure name="MFU" value={formatShare(run.mfu)} full={run.mfu} />
        <Figure name="time in steps" value={formatDuration(run.elapsed)} full={run.elapsed} />
        <Figure name="attention" value={run.attention ?? "–"} note={keptNote(run)} />
      </dl>
      {run.resumed.length ? (
        <p class="hint">
          Resumed at step {run.resumed.map(({ step }) => formatNumber(step)).join(", ")}: the curve goes on.
        </p>
      ) : null}
      {series.bucket > 1 ? (
        <p class="hint">
          Curves show the lowest and highest value of every {series.bucket} steps; zoom in to see each step.
        </p>
      ) : null}
      <DensityGrid run={run} />
      {run.command ? (
        <>
          <h3>Command</h3>
          <Command>{run.command}</Command>
        </>
      ) : (
        <p class="hint">This run did not write down its command.</p>
      )}
      <Fold title="Configuration" value={run.config} />
      <Fold title="Data" value={run.data} />
      <Fold title="Environment" value={run.environment} />
    </section>
  );
}

function keptNote({ density, kept_share }: RunEntry): string | undefined {
  if (typeof density !== "number") return undefined;
  return `${formatShare(density)} of the blocks${typeof kept_share === "number" ? `, ${formatShare(kept_share)} kept at last` : ""}`;
}

function DensityGrid({ run }: { run: RunData["run"] }) {
  const { densities } = run;
  const [chosen, setChosen] = useState<number | null>(null);
  if (!densities.length)
    return run.attention && run.attention !== "hads" ? null : (
      <p class="hint">This run wrote no density by layer and head.</p>
    );
  const at = Math.min(chosen ?? densities.length - 1, densities.length - 1);
  const { step, layers } = densities[at]!;
  return (
    <>
      <h3>Density by layer and head</h3>
      <Slider
        label="from step"
        value={at}
        min={0}
        max={densities.length - 1}
        text={formatNumber(step)}
        onInput={(n) => setChosen(n === densities.length - 1 ? null : n)}
      />
      <HeadGrid
        values={layers}
        label={`Share of blocks that each head keeps from step ${step} on`}
        middle={budgetMiddle(run.density)}
      />
      <ShareScale what="the blocks kept" middle={budgetMiddle(run.density)} />
    </>
  );
}

function Fold({ title, value }: { title: string; value: Maybe<Record<string, unknown>> }) {
  if (!value || Object.keys(value).length === 0) return null;
  return (
    <details>
      <summary>{title}</summary>
      <Tree value={value} />
    </details>
  );
}
