// Runs and their curves: asked for once, then kept up by one event stream per page, which resumes by id.

import { useEffect, useState } from "preact/hooks";
import { asError, type DocumentError, getDocument, isStatic } from "./source";
import type { Curve, Densities, Maybe, Metric, Run, Runs, Series } from "./types";

export interface RunData {
  run: Run;
  series: Series;
  /** A closer look at the steps of a zoom, where `series` is thinned. */
  detail: Series | null;
  lastId: Maybe<string>;
  gone: boolean;
}

interface RunEvent {
  run: string;
  event: string;
  id: Maybe<string>;
  data: Record<string, unknown>;
}

export type Link = "connecting" | "live" | "lost" | "recorded";

const REDRAW_MS = 200;
const RETRY_MS = 1000;
const MOST_FOLLOWED = 32; // by one stream
const MOST_POINTS = 6000; // then the server thins the curve again

export class RunStore {
  list: Runs | null = null;
  error: DocumentError | null = null;
  link: Link = isStatic ? "recorded" : "connecting";
  readonly data = new Map<string, RunData>();
  readonly errors = new Map<string, DocumentError>();
  private wanted: string[] = [];
  private zoom: [number, number] | null = null;
  private stream: EventSource | null = null;
  private followed: string | null = null;
  private retry = 0;
  private timer = 0;
  private drawn = Number.NEGATIVE_INFINITY;
  private readonly listeners = new Set<() => void>();
  private readonly loading = new Set<string>();

  start(): () => void {
    void this.readList();
    document.addEventListener("visibilitychange", this.seen);
    return () => {
      document.removeEventListener("visibilitychange", this.seen);
      this.close();
    };
  }

  listen(changed: () => void): () => void {
    this.listeners.add(changed);
    return () => {
      this.listeners.delete(changed);
    };
  }

  /** The runs to draw. */
  want(ids: string[]): void {
    this.wanted = ids;
    for (const id of ids) if (!this.data.has(id) && !this.errors.has(id)) void this.load(id);
    this.follow();
  }

  /** Ask for all that a thinned curve leaves out between two steps; null forgets it. */
  closeUp(steps: [number, number] | null): void {
    if (steps?.[0] === this.zoom?.[0] && steps?.[1] === this.zoom?.[1]) return;
    this.zoom = steps;
    for (const data of this.data.values()) data.detail = null;
    this.changed();
    if (!steps || isStatic) return;
    for (const id of this.wanted) {
      const data = this.data.get(id);
      if (!data || data.series.bucket <= 1) continue;
      const query = `?from=${Math.max(0, Math.floor(steps[0]))}&to=${Math.ceil(Math.max(0, steps[1]))}`;
      getDocument<Series>(`api/runs/${id}/series`, query).then(
        (detail) => {
          if (this.zoom !== steps) return;
          data.detail = detail;
          this.changed();
        },
        () => undefined,
      );
    }
  }

  private async readList(): Promise<void> {
    try {
      this.list = await getDocument<Runs>("api/runs");
      this.error = null;
    } catch (error) {
      this.error = asError(error);
    }
    this.changed();
    this.follow();
  }

  private async load(id: string): Promise<void> {
    if (this.loading.has(id)) return;
    this.loading.add(id);
    try {
      const about = getDocument<Run>(`api/runs/${id}`);
      let [run, series]: [Run, Series] = await Promise.all([about, getDocument<Series>(`api/runs/${id}/series`)]);
      // Where a run grows meanwhile, the series must be the later one: events that it holds already are left out.
      if (run.last_id !== series.last_id) series = await getDocument<Series>(`api/runs/${id}/series`);
      this.data.set(id, { run, series, detail: null, lastId: run.last_id, gone: false });
      this.errors.delete(id);
    } catch (error) {
      this.errors.set(id, asError(error));
    }
    this.loading.delete(id);
    this.drawn = 0; // what was asked for is drawn at once; only what a stream adds waits for the next redraw
    clearTimeout(this.timer);
    this.timer = 0;
    this.changed();
    this.follow();
  }

  // -- the stream ----------------------------------------------------------------------------------------------------

  private follow(): void {
    if (isStatic || document.hidden) return;
    const ids = this.wanted.filter((id) => this.data.has(id) && !this.data.get(id)!.gone).slice(0, MOST_FOLLOWED);
    const followed = ids.join(",");
    if (this.stream && followed === this.followed) return;
    this.close();
    this.followed = followed;
    const after = ids.map((id) => `${id}@${this.data.get(id)!.lastId ?? ""}`).join(",");
    const stream = new EventSource(`api/events${after ? `?follow=${encodeURIComponent(after)}` : ""}`);
    this.stream = stream;
    stream.onopen = () => this.linked("live");
    stream.onerror = () => {
      // The browser would come back with the ids of the first time: close, and open with those of now.
      this.close();
      this.linked("lost");
      this.retry = window.setTimeout(() => this.follow(), RETRY_MS);
    };
    stream.addEventListener("runs", (event) => this.listed(JSON.parse(event.data) as Runs));
    stream.addEventListener("run", (event) => {
      const events = JSON.parse(event.data) as RunEvent | RunEvent[];
      for (const one of Array.isArray(events) ? events : [events]) this.apply(one);
      this.changed();
    });
  }

  private close(): void {
    clearTimeout(this.retry);
    this.stream?.close();
    this.stream = null;
  }

  /** A tab that nobody sees holds no connection: browsers have six per host. */
  private readonly seen = (): void => {
    if (document.hidden) {
      this.close();
    } else if (!isStatic) {
      void this.readList();
    }
  };

  private linked(link: Link): void {
    if (this.link === link) return;
    this.link = link;
    this.changed();
  }

  private listed(list: Runs): void {
    this.list = list;
    this.error = null;
    for (const entry of list.runs) {
      const data = this.data.get(entry.id);
      if (data) {
        const more = typeof data.run.read_share === "number" && data.run.read_share !== entry.read_share;
        Object.assign(data.run, entry);
        if (more) void this.load(entry.id);
      }
      // A run that appeared under an address that was shown already.
      else if (this.wanted.includes(entry.id) && this.errors.delete(entry.id)) void this.load(entry.id);
    }
    this.changed();
  }

  private apply({ run: id, event, id: eventId, data: values }: RunEvent): void {
    const data = this.data.get(id);
    if (!data) return;
    if (eventId) data.lastId = eventId;
    if (event === "status") {
      Object.assign(data.run, values);
    } else if (event === "gone") {
      data.gone = true;
    } else if (event === "reset") {
      this.followed = null; // the stream follows this run no more: open it again after loading
      void this.load(id);
    } else if (event === "step" || event === "eval" || event === "density") {
      addPoints(data, values);
    }
    if (event === "density") addDensities(data.run.densities, values as unknown as Densities);
    if (Object.values(data.series.series).some((curve) => curve.step.length > MOST_POINTS)) void this.load(id);
  }

  private changed(): void {
    const wait = Math.max(0, this.drawn + REDRAW_MS - performance.now());
    this.timer ||= window.setTimeout(() => {
      this.timer = 0;
      this.drawn = performance.now();
      this.listeners.forEach((listener) => listener());
    }, wait);
  }
}

const NO_METRICS = new Set(["step", "time", "at"]); // `at` is the date of the event

/** Each number of an event goes to the curve of its name, which begins with the first number; a step that is there
 * already is left alone. */
function addPoints({ run, series }: RunData, values: Record<string, unknown>): void {
  const step = values["step"] as number;
  const time = (values["time"] ?? null) as number | null;
  for (const [name, value] of Object.entries(values)) {
    if (NO_METRICS.has(name) || (typeof value !== "number" && value !== null)) continue;
    if (value === null && !series.series[name]) continue;
    const curve = (series.series[name] ??= emptyCurve(run.metrics, name));
    if (curve.step.length && curve.step[curve.step.length - 1]! >= step) continue;
    curve.step.push(step);
    curve.time.push(time);
    curve.value.push(value);
    if (name in run) (run as unknown as Record<string, unknown>)[name] = value;
  }
  if ((run.step ?? -1) < step) run.step = step;
}

function emptyCurve(metrics: Metric[], name: string): Curve {
  if (!metrics.some((metric) => metric.name === name)) {
    metrics.push({ name, title: name.replaceAll("_", " "), unit: null, log: false, points: 0 });
  }
  return { step: [], time: [], value: [] };
}

function addDensities(densities: Densities[], { step, layers }: Densities): void {
  if (!densities.length || densities[densities.length - 1]!.step < step) densities.push({ step, layers });
}

/** One store per page, redrawn a few times per second at most. */
export function useRuns(): RunStore {
  const [store] = useState(() => new RunStore());
  const [, redraw] = useState(0);
  useEffect(() => {
    const stop = store.listen(() => redraw((n) => n + 1));
    const end = store.start();
    return () => {
      stop();
      end();
    };
  }, [store]);
  return store;
}
