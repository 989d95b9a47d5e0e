// Methods side by side at one budget: their masks of one head, what they cost the model, and KL over budgets.

import { useMemo } from "preact/hooks";
import { type Blocks, keptShare } from "./blocks";
import { BlockMap, type Shown } from "./block_map";
import { Chart } from "./chart";
import { lineColour, lineDash } from "./colour";
import { formatNumber, formatShare } from "./format";
import { methodTitle } from "./recording";
import { setQuery } from "./route";
import { Table, type TableColumn } from "./table";
import { useTheme } from "./theme";
import type { MethodResult, Recording } from "./types";
import type { View } from "./view";

interface SmallMapProps {
  recording: Recording;
  name: string;
  on: boolean;
  budget: string;
  at: [number, number];
  blocks: Blocks | null;
  view: View;
  shown: Shown;
}

export function SmallMap({ recording, name, on, budget, at: [layer, head], blocks, view, shown }: SmallMapProps) {
  const result = recording.results.find((one) => one.method === name && String(one.budget) === budget);
  const mass = recording.kept_mass[name]?.[budget]?.[layer]?.[head];
  const title = methodTitle(recording, name);
  return (
    <div class={on ? "small-map on" : "small-map"} data-method={name}>
      <h3>
        <button type="button" class="link" aria-pressed={on} onClick={() => setQuery({ method: name })}>
          {title}
        </button>
      </h3>
      {blocks ? (
        <BlockMap blocks={blocks} view={view} shown={shown} label={`${title}, layer ${layer}, head ${head}`} />
      ) : (
        <p class="empty">Not recorded.</p>
      )}
      <p class="small-facts">
        <span>
          KL{" "}
          <b data-name="kl" title={result?.kl?.toString()}>
            {formatNumber(result?.kl, 3)}
          </b>
        </span>
        {blocks ? <span>{formatShare(keptShare(blocks))} of this head's blocks</span> : null}
        <span>{formatShare(mass)} of its attention</span>
      </p>
    </div>
  );
}

export function MethodTable({
  recording,
  budget,
  title,
}: {
  recording: Recording;
  budget: string;
  title: (name: string) => string;
}) {
  const rows = recording.results.filter((one) => String(one.budget) === budget);
  const columns: TableColumn<MethodResult>[] = [
    { name: "method", cell: (row) => title(row.method), sort: (row) => title(row.method) },
    {
      name: "blocks kept",
      number: true,
      cell: (row) => formatShare(row.density),
      sort: (row) => row.density,
      full: (row) => String(row.density),
    },
    {
      name: "KL",
      unit: "nats per token",
      number: true,
      cell: (row) => formatNumber(row.kl),
      sort: (row) => row.kl,
      full: (row) => row.kl?.toString(),
    },
    {
      name: "perplexity above dense",
      number: true,
      cell: (row) => formatShare(row.perplexity_gap),
      sort: (row) => row.perplexity_gap,
      full: (row) => row.perplexity_gap?.toString(),
    },
    {
      name: "same next token",
      number: true,
      cell: (row) => formatShare(row.same_token),
      sort: (row) => row.same_token,
      full: (row) => row.same_token?.toString(),
    },
  ];
  return <Table caption="What each method costs the model on this text" columns={columns} rows={rows} />;
}

/** HADS beside the best of the other methods at every budget, in numbers: on some texts HADS is not ahead. */
export function Standing({ recording, title }: { recording: Recording; title: (name: string) => string }) {
  const lines = recording.budgets.flatMap((budget) => {
    const found = recording.results.filter((one) => one.budget === budget && typeof one.kl === "number");
    const ours = found.find(({ method }) => method === "hads");
    const others = found.filter(({ method }) => method !== "hads" && !recording.oracles.includes(method));
    const best = others.sort((a, b) => a.kl! - b.kl!)[0];
    return ours && best
      ? [`${formatNumber(ours.kl)} and ${formatNumber(best.kl)} (${title(best.method)}) at ${formatShare(budget)}`]
      : [];
  });
  if (lines.length === 0) return null;
  return (
    <p class="hint" data-standing={recording.id}>
      KL of HADS and of the best other method on this text, oracles left out: {lines.join(", ")}. The{" "}
      <a href="#/benchmarks">benchmarks</a> of HADS compare methods on many texts, from 4,096 tokens on. In a short text
      the blocks that HADS always keeps take a large part of a small budget.
    </p>
  );
}

export function QualityChart({ recording, title }: { recording: Recording; title: (name: string) => string }) {
  const { dark } = useTheme();
  const lines = useMemo(
    () =>
      recording.methods.map((name, n) => {
        const of = recording.results.filter((one) => one.method === name).sort((a, b) => a.density - b.density);
        const dash = recording.oracles.includes(name) ? [6, 4] : lineDash(n);
        return {
          name: title(name),
          colour: lineColour(n),
          dash,
          x: of.map((one) => one.density),
          y: of.map((one) => one.kl ?? null),
          dots: true,
        };
      }),
    [recording, dark],
  );
  return (
    <Chart
      title="KL from dense"
      unit="nats per token, log scale; lower is better"
      lines={lines}
      xTitle="blocks kept"
      xFormat={formatShare}
      log
      height={260}
    />
  );
}
