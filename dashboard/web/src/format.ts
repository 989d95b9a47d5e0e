// Numbers, times and dates as people read them. What is not known is a dash.

import type { Maybe } from "./types";

export const UNKNOWN = "–";
const BEYOND = 1e15; // numbers that no prefix shortens
const LONGEST = 100 * 86400; // seconds that are shown as hours

/** Four significant digits: 3.904, 0.000124, 873,400, 11.16G. */
export function formatNumber(x: Maybe<number>, digits = 4): string {
  if (x === null || x === undefined || !Number.isFinite(x)) return UNKNOWN;
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return x.toLocaleString("en-US");
  const size = Math.abs(x);
  if (size >= 1e6 && size < BEYOND) return formatCount(x, digits);
  if (size >= BEYOND || (size > 0 && size < 1e-4)) return x.toExponential(digits - 1);
  return x.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

/** 873k, 7.86M: for counts where a glance is enough. */
export function formatCount(x: Maybe<number>, digits = 3): string {
  if (x === null || x === undefined || !Number.isFinite(x)) return UNKNOWN;
  if (Math.abs(x) >= BEYOND) return x.toExponential(digits - 1);
  const names = ["", "k", "M", "G", "T"];
  let size = x;
  let n = 0;
  while (Math.abs(size) >= 999.5 && n < names.length - 1) {
    size /= 1000;
    n += 1;
  }
  return size.toLocaleString("en-US", { maximumSignificantDigits: digits }) + names[n];
}

export function formatShare(x: Maybe<number>, digits = 3): string {
  if (x === null || x === undefined || !Number.isFinite(x)) return UNKNOWN;
  return `${(100 * x).toLocaleString("en-US", { maximumSignificantDigits: digits })}%`;
}

/** A measured time: 124.2 µs, 4.01 ms, 1.879 s. */
export function formatSeconds(x: Maybe<number>): string {
  if (x === null || x === undefined || !Number.isFinite(x)) return UNKNOWN;
  const size = Math.abs(x);
  if (size === 0) return "0 s";
  if (size < 1e-6) return `${formatNumber(x * 1e9)} ns`;
  if (size < 1e-3) return `${formatNumber(x * 1e6)} µs`;
  if (size < 1) return `${formatNumber(x * 1e3)} ms`;
  return `${formatNumber(x)} s`;
}

/** A duration: 42 s, 5:07, 1:02:03. */
export function formatDuration(x: Maybe<number>): string {
  if (x === null || x === undefined || !Number.isFinite(x)) return UNKNOWN;
  if (x < 60) return `${x < 10 ? formatNumber(x, 2) : Math.round(x)} s`;
  if (x >= LONGEST) return `${formatNumber(Math.round(x / 86400))} days`;
  const whole = Math.round(x);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n: number) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** 2026-11-15 09:02 UTC. */
export function formatDate(iso: Maybe<string>): string {
  if (!iso) return UNKNOWN;
  const date = new Date(iso);
  return Number.isNaN(date.getTime()) ? iso : `${date.toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

/** A value in its unit: times get a prefix, other units follow the number. */
export function formatIn(unit: Maybe<string>, x: Maybe<number>): string {
  if (unit === "s") return formatSeconds(x);
  const text = formatNumber(x);
  return unit && text !== UNKNOWN ? `${text}${unit === "%" || unit === "×" ? "" : " "}${unit}` : text;
}

/** "q 128, kv 64": a configuration in one line. */
export function formatConfig(config: Maybe<Record<string, unknown>>): string {
  if (!config) return UNKNOWN;
  const one = (value: unknown): string =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? `(${formatConfig(value as Record<string, unknown>)})`
      : Array.isArray(value)
        ? value.map(one).join(" × ")
        : String(value);
  return Object.entries(config)
    .map(([name, value]) => `${name} ${one(value)}`)
    .join(", ");
}
