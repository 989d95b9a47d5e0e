// Small parts that every page uses.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { formatDate } from "./format";
import type { DocumentError } from "./source";
import type { Environment, Maybe, Skipped } from "./types";

/** Where and when a figure was recorded. */
export function Provenance({
  environment,
  children,
}: {
  environment: Maybe<Environment>;
  children?: ComponentChildren;
}) {
  const { device, date, commit, command } = environment ?? {};
  return (
    <p class="provenance">
      {device ? <>Recorded on {device}</> : <>Recorded on a device that was not written down</>}
      {date ? (
        <>
          , <time dateTime={date}>{formatDate(date)}</time>
        </>
      ) : null}
      {commit ? (
        <>
          , commit <code>{commit.slice(0, 7)}</code>
        </>
      ) : null}
      {children}
      {command ? (
        <>
          {" "}
          by <code>{command}</code>
        </>
      ) : null}
    </p>
  );
}

/** A command to copy. */
export function Command({ children }: { children: string }) {
  const [said, setSaid] = useState("Copy");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(children);
      setSaid("Copied");
    } catch {
      setSaid("Select it, please");
    }
    setTimeout(() => setSaid("Copy"), 1500);
  };
  return (
    <div class="command">
      <pre tabIndex={0}>{children}</pre>
      <button type="button" onClick={copy}>
        {said}
      </button>
    </div>
  );
}

export function Failure({ error }: { error: DocumentError }) {
  return (
    <div class="notice bad" role="alert">
      {error.message}
    </div>
  );
}

export function Waiting({ what }: { what: string }) {
  return <p class="waiting">Reading {what} …</p>;
}

/** Shown where there is nothing to show: what the page is for, and how to get something. */
export function Nothing({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <div class="nothing">
      <h2>{title}</h2>
      {children}
    </div>
  );
}

export function SkippedFiles({ skipped }: { skipped: Maybe<Skipped[]> }) {
  if (!skipped?.length) return null;
  return (
    <details class="skipped">
      <summary>
        {skipped.length} {skipped.length === 1 ? "file was" : "files were"} left out
      </summary>
      <ul>
        {skipped.map(({ path, reason }) => (
          <li key={path}>
            <code>{path}</code>: {reason}
          </li>
        ))}
      </ul>
    </details>
  );
}

interface ChoiceProps<T extends string> {
  label: string;
  options: [T, string][];
  value: T;
  onChange: (value: T) => void;
}

/** A few alternatives side by side; arrow keys move among them. */
export function Choice<T extends string>({ label, options, value, onChange }: ChoiceProps<T>) {
  return (
    <fieldset class="choice">
      <legend>{label}</legend>
      <div>
        {options.map(([name, title]) => (
          <label key={name} class={name === value ? "on" : ""}>
            <input type="radio" name={label} value={name} checked={name === value} onChange={() => onChange(name)} />
            {title}
          </label>
        ))}
      </div>
    </fieldset>
  );
}

interface SelectProps {
  label: string;
  options: [string, string][];
  value: string;
  onChange: (value: string) => void;
}

export function Select({ label, options, value, onChange }: SelectProps) {
  return (
    <label class="field">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {options.map(([name, title]) => (
          <option key={name} value={name}>
            {title}
          </option>
        ))}
      </select>
    </label>
  );
}

interface SliderProps {
  label: string;
  value: number;
  min: number;
  max: number;
  step?: number;
  text: string;
  onInput: (value: number) => void;
}

export function Slider({ label, value, min, max, step = 1, text, onInput }: SliderProps) {
  return (
    <label class="field slider">
      <span>
        {label} <output>{text}</output>
      </span>
      <input
        type="range"
        min={min}
        max={max}
        step={step}
        value={value}
        aria-valuetext={text}
        onInput={(event) => onInput(event.currentTarget.valueAsNumber)}
      />
    </label>
  );
}

/** A number with its name. */
export function Figure({
  name,
  value,
  note,
  full,
}: {
  name: string;
  value: string;
  note?: string;
  full?: Maybe<number>;
}) {
  return (
    <div class="figure">
      <dt>{name}</dt>
      <dd title={full === null || full === undefined ? undefined : String(full)} data-name={name}>
        {value}
      </dd>
      {note ? <dd class="note">{note}</dd> : null}
    </div>
  );
}

/** Names and values of any depth, from users' files, as text. */
export function Tree({ value }: { value: unknown }) {
  if (value !== null && typeof value === "object") {
    const entries = Object.entries(value as Record<string, unknown>);
    return (
      <dl class="tree">
        {entries.map(([name, inner]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <Tree value={inner} />
            </dd>
          </div>
        ))}
      </dl>
    );
  }
  return <>{String(value)}</>;
}
