// Layers x heads as coloured squares; one square is the head in view. Arrow keys move, as in a grid.

import { useRef } from "preact/hooks";
import { cssColour, sequentialMap, toCss } from "./colour";
import { formatShare } from "./format";
import { useTheme } from "./theme";
import type { Maybe } from "./types";

interface Props {
  /** values[layer][head], from 0 to 1. */
  values: number[][];
  label: string;
  chosen?: [number, number] | null;
  onChoose?: (layer: number, head: number) => void;
  /** Heads that cannot be opened. */
  closed?: (layer: number, head: number) => boolean;
  /** The share in the middle of the colour scale: heads differ most around it. */
  middle?: number;
}

/** 0 and 1 are the ends of the scale, `middle` is its middle. */
function toColour(value: number, middle: number): number {
  return Math.round(255 * Math.min(1, Math.max(0, value)) ** (Math.log(0.5) / Math.log(middle)));
}

/** A budget as the middle of a scale; a budget of everything has no middle. */
export function budgetMiddle(budget: Maybe<number>): number {
  return typeof budget === "number" && budget > 0.02 && budget < 0.9 ? budget : 0.5;
}

export function HeadGrid({ values, label, chosen, onChoose, closed, middle = 0.5 }: Props) {
  useTheme();
  const table = useRef<HTMLTableElement>(null);
  const colours = sequentialMap();
  const heads = Math.max(0, ...values.map((row) => row.length));
  const [layer, head] = chosen ?? [0, 0];
  const key = (event: KeyboardEvent) => {
    const moves: Record<string, [number, number]> = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
    };
    const move = moves[event.key];
    if (!move || !onChoose) return;
    event.preventDefault();
    let [row, column] = [layer + move[0], head + move[1]];
    while (values[row]?.[column] !== undefined && closed?.(row, column))
      [row, column] = [row + move[0], column + move[1]];
    if (values[row]?.[column] === undefined) return;
    onChoose(row, column);
    table.current?.querySelector<HTMLElement>(`[data-layer="${row}"][data-head="${column}"]`)?.focus();
  };
  return (
    <div class="scroll">
      <table
        class="head-grid"
        ref={table}
        role="grid"
        aria-label={label}
        style={{ maxWidth: `${26 + 40 * heads}px` }}
        onKeyDown={key}
      >
        <thead>
          <tr>
            <th aria-label="layer" />
            {Array.from({ length: heads }, (_, n) => (
              <th key={n} scope="col">
                {n}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {values.map((row, l) => (
            <tr key={l}>
              <th scope="row">{l}</th>
              {row.map((value, h) => {
                const on = chosen !== null && chosen !== undefined && l === layer && h === head;
                const shut = closed?.(l, h) ?? false;
                const text = `layer ${l}, head ${h}: ${formatShare(value)}`;
                return (
                  <td key={h} role="gridcell" aria-selected={on}>
                    <button
                      type="button"
                      class={on ? "on" : ""}
                      title={shut ? `${text} (its blocks were not recorded)` : text}
                      aria-label={text}
                      data-layer={l}
                      data-head={h}
                      data-value={value}
                      tabIndex={onChoose && (on || (!chosen && l + h === 0)) ? 0 : -1}
                      disabled={!onChoose || shut}
                      style={{ background: toCss(colours[toColour(value, middle)]!) }}
                      onClick={() => onChoose?.(l, h)}
                    />
                  </td>
                );
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The scale of `HeadGrid`. */
export function ShareScale({ what, middle = 0.5 }: { what: string; middle?: number }) {
  return <ColourScale low="0%" middle={formatShare(middle)} high={`100% of ${what}`} />;
}

/** The colour scale with its ends, and what lies in the middle, named. */
export function ColourScale({ low, high, middle }: { low: string; high: string; middle?: string }) {
  useTheme();
  const colours = sequentialMap();
  const stops = Array.from({ length: 9 }, (_, n) => toCss(colours[Math.round((255 * n) / 8)]!)).join(", ");
  return (
    <div class="colour-scale">
      <span>{low}</span>
      <i style={{ background: `linear-gradient(to right, ${stops})`, borderColor: cssColour("--line") }}>
        {middle ? <span>{middle}</span> : null}
      </i>
      <span>{high}</span>
    </div>
  );
}
