// The documents of dashboard/API.md, as far as the pages read them.

export type Maybe<T> = T | null | undefined;

export interface Site {
  static: boolean;
  version: string;
  built: string;
  features: { live: boolean; own_text: boolean; own_text_reason: Maybe<string> };
  pages: Record<string, boolean>;
  commit: Maybe<string>;
}

export interface Environment {
  date?: Maybe<string>;
  command?: Maybe<string>;
  commit?: Maybe<string>;
  device?: Maybe<string>;
  platform?: Maybe<string>;
  python?: Maybe<string>;
  versions?: Maybe<Record<string, string>>;
  [other: string]: unknown;
}

export type Status = "running" | "stalled" | "failed" | "finished";

export interface RunEntry {
  id: string;
  name: string;
  path: string;
  status: Status;
  status_reason: Maybe<string>;
  step: Maybe<number>;
  steps: Maybe<number>;
  tokens: Maybe<number>;
  tokens_per_step: Maybe<number>;
  loss: Maybe<number>;
  held_out_loss: Maybe<number>;
  tokens_per_second: Maybe<number>;
  mfu: Maybe<number>;
  elapsed: Maybe<number>;
  remaining: Maybe<number>;
  attention: Maybe<string>;
  density: Maybe<number>;
  preset: Maybe<string>;
  started: Maybe<string>;
  last_event: Maybe<string>;
  file_bytes: Maybe<number>;
  /** How much of a very long file was read so far; null when all was. */
  read_share?: Maybe<number>;
  kept_share?: Maybe<number>;
  recorded: boolean;
}

export interface Skipped {
  path: string;
  reason: string;
}

export interface Runs {
  runs: RunEntry[];
  skipped: Skipped[];
}

export interface Metric {
  name: string;
  title: string;
  unit: Maybe<string>;
  log: boolean;
  points: number;
}

export interface Densities {
  step: number;
  layers: number[][];
}

export interface Run extends RunEntry {
  config: Maybe<Record<string, unknown>>;
  data: Maybe<Record<string, unknown>>;
  command: Maybe<string>;
  environment: Maybe<Record<string, unknown>>;
  metrics: Metric[];
  resumed: { step: number; time: Maybe<string> }[];
  recalibrated: { step: number; seconds: Maybe<number> }[];
  densities: Densities[];
  last_id: Maybe<string>;
}

export interface Curve {
  step: number[];
  time: (number | null)[];
  value: (number | null)[];
}

export interface Series {
  id: string;
  tokens_per_step: Maybe<number>;
  from: number;
  to: number;
  bucket: number;
  last_id: Maybe<string>;
  series: Record<string, Curve>;
}

export interface Spread {
  y: number | null;
  low?: Maybe<number>;
  high?: Maybe<number>;
  n?: Maybe<number>;
}

export interface Times {
  median: number;
  low: Maybe<number>;
  high: Maybe<number>;
  rounds: Maybe<number>;
}

export interface StudyEntry {
  id: string;
  name: string;
  storage: string;
  device: Maybe<string>;
  title: string;
  direction: Maybe<string>;
  trials: number;
  complete: number;
  slower: number;
  failed: number;
  wrong: number;
  running: number;
  best: Maybe<number>;
  best_config: Maybe<Record<string, unknown>>;
  updated: Maybe<string>;
}

export interface Trial {
  number: number;
  state: string;
  value: Maybe<number>;
  config: Maybe<Record<string, unknown>>;
  reason: Maybe<string>;
  rounds: Maybe<number[]>;
  started: Maybe<string>;
  seconds: Maybe<number>;
  is_default: boolean;
}

export interface Study extends StudyEntry {
  trials_list: Trial[];
  best_so_far: [number, number][];
}

export interface DatabaseEntry {
  id: string;
  device: string;
  origin: string;
  path: string;
  entries: number;
  gain: Maybe<{ best: Maybe<number>; geometric_mean: Maybe<number>; faster: Maybe<number> }>;
}

export interface DatabaseRow {
  direction: string;
  implementation: string;
  dtype: string;
  call: string;
  density: Maybe<number>;
  config: Record<string, unknown>;
  source: string;
  speedup: Maybe<number>;
  date: Maybe<string>;
  kernel: Maybe<string>;
  measured: Maybe<{ workload: string; density: Maybe<number>; default: Times; tuned: Times }[]>;
  cycles: Maybe<{ default: number; tuned: number }>;
  trials: Maybe<Record<string, number>>;
}

export interface Database extends DatabaseEntry {
  rows: DatabaseRow[];
  environments: Record<string, Environment>;
}

export interface Tuning {
  studies: StudyEntry[];
  skipped: Skipped[];
  optuna_dashboard: Maybe<string>;
  databases: DatabaseEntry[];
}

export interface RecordingEntry {
  id: string;
  title: string;
  model: string;
  length: number;
  block: number;
  side: number;
  layers: number;
  heads: number;
  budgets: number[];
  methods: string[];
  text: { name: string; domain: Maybe<string> };
  environment: Environment;
}

export interface MethodResult {
  method: string;
  budget: number;
  density: number;
  kl: Maybe<number>;
  loss: Maybe<number>;
  perplexity_gap: Maybe<number>;
  same_token: Maybe<number>;
}

export type ByMethod<T> = Record<string, Record<string, T>>;

export interface Recording extends RecordingEntry {
  method_titles: Record<string, string>;
  oracles: string[];
  blocks: { start: number; end: number; text: string }[];
  loss: Maybe<number>;
  shares: ByMethod<number[][]>;
  kept_mass: ByMethod<number[][]>;
  results: MethodResult[];
  detail: [number, number][] | null;
}

export interface LayerHead {
  head: number;
  sensitivity: Maybe<number>;
  burstiness: Maybe<number>;
  mass: string;
  cost: string;
  cost_scale: number;
  kept: ByMethod<string>;
}

export interface Layer {
  layer: number;
  side: number;
  heads: LayerHead[];
}

export interface OwnText {
  id: string;
  state: "queued" | "running" | "done" | "failed";
  position: Maybe<number>;
  stage: Maybe<string>;
  done: Maybe<number>;
  of: Maybe<number>;
  error: Maybe<string>;
  recording: Maybe<string>;
}

export interface BenchmarkEntry {
  id: string;
  title: string;
  group: string;
  measures: string;
  command: string;
  needs: Maybe<string>;
  state: "recorded" | "not_run" | "unreadable";
  reason?: Maybe<string>;
  date: Maybe<string>;
  device: Maybe<string>;
  commit: Maybe<string>;
}

export interface PlotAxis {
  title: string;
  unit: Maybe<string>;
  log: boolean;
}

export interface PlotPoint extends Spread {
  x: number;
}

export interface PlotSeries {
  name: string;
  role: "ours" | "peer" | "reference";
  points: PlotPoint[];
}

export interface Plot {
  id: string;
  title: string;
  kind: "line" | "bar";
  x: PlotAxis & { categories: Maybe<string[]> };
  y: PlotAxis & { better: Maybe<"lower" | "higher"> };
  series: PlotSeries[];
}

export interface Column {
  name: string;
  unit: Maybe<string>;
  kind: "text" | "number" | "share" | "spread";
}

export type Cell = string | number | boolean | Spread | null;

export interface RecordTable {
  id: string;
  title: string;
  columns: Column[];
  rows: Cell[][];
}

export interface Benchmark extends BenchmarkEntry {
  environment: Environment;
  notes: string[];
  plots: Plot[];
  tables: RecordTable[];
}

export interface ReplayEntry {
  id: string;
  title: string;
  environment: Environment;
  runs: { id: string; title: string; attention: string; density: Maybe<number> }[];
  steps: number;
  checkpoints: number[];
}

export interface Replay extends ReplayEntry {
  length: number;
  block: number;
  side: number;
  layers: number;
  heads: number;
  tokens_per_step: Maybe<number>;
  text: string[];
  series: Record<string, Record<string, Curve>>;
  densities: Record<string, Densities[]>;
  frames: Record<string, { step: number; name: string }[]>;
}

export interface Frame {
  run: string;
  step: number;
  side: number;
  density: Maybe<number>;
  heads: { layer: number; head: number; share: Maybe<number>; mass: string; kept: string }[];
}
