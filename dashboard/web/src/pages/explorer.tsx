// HADS explorer: what each head keeps, where its attention lies, and what other methods keep at the same budget.

import { useEffect, useMemo, useState } from "preact/hooks";
import { type Blocks, blockCount, blockNumber, decodeBits, decodeBytes, decodeMass, keptShare, LOWEST } from "../blocks";
import { BlockMap, type Shown } from "../block_map";
import { Chart } from "../chart";
import { lineColour, lineDash, lossMap, toCss } from "../colour";
import { formatNumber, formatShare } from "../format";
import { budgetMiddle, ColourScale, HeadGrid, ShareScale } from "../head_grid";
import { OwnTextForm } from "../own_text";
import { Choice, Command, Failure, Figure, Nothing, Provenance, Select, Slider, Waiting } from "../parts";
import { address, setQuery, type Route } from "../route";
import { isStatic, useDocument } from "../source";
import { Table, type TableColumn } from "../table";
import { useTheme } from "../theme";
import type { Layer, LayerHead, MethodResult, Recording, RecordingEntry, Site } from "../types";
import { View } from "../view";

const SHOWN: [Shown, string][] = [
  ["kept-lost", "Kept, lost"],
  ["mass", "Attention"],
  ["kept", "Kept"],
  ["cost", "Cost"],
];

export function ExplorerPage({ route, site }: { route: Route; site: Site | null }) {
  const list = useDocument<{ recordings: RecordingEntry[] }>("api/recordings");
  const id = route.part ?? list.data?.recordings[0]?.id ?? null;
  const { data: recording, error, name } = useDocument<Recording>(id === null ? null : `api/recordings/${id}`);
  const entries = list.data?.recordings ?? [];
  const options = entries.map((one): [string, string] => [one.id, one.title]);
  if (id && !entries.some((one) => one.id === id) && recording) options.push([id, recording.title]);
  const chosen = recording && name === `api/recordings/${id}` ? recording : null;
  return (
    <>
      {list.error ? <Failure error={list.error} /> : null}
      {list.data && id === null ? (
        <Nothing title="No recording yet">
          <p>A recording holds a model's attention on one text and the blocks that each method keeps. {isStatic ? "None is part of this showcase." : "Paste a text below to make one, or record one in a checkout of the source:"}</p>
          {isStatic ? null : <Command>python -m benchmarks.explorer --record</Command>}
        </Nothing>
      ) : null}
      {error ? <Failure error={error} /> : null}
      {id !== null && !chosen && !error ? <Waiting what="the recording" /> : null}
      {chosen ? <Explore key={chosen.id} recording={chosen} route={route} options={options} /> : null}
      {site && !site.static ? <OwnTextForm site={site} route={route} /> : null}
    </>
  );
}

function Explore({ recording, route, options }: { recording: Recording; route: Route; options: [string, string][] }) {
  const { budgets, methods, side } = recording;
  const query = route.query;
  const method = methods.find((one) => one === query.get("method")) ?? methods[0]!;
  const asked = budgets.indexOf(Number(query.get("budget")));
  const at = asked >= 0 ? asked : Math.floor((budgets.length - 1) / 2);
  const budget = String(budgets[at]);
  const shown = SHOWN.find(([one]) => one === query.get("show"))?.[0] ?? "kept-lost";
  const by = query.get("by") === "mass" ? "mass" : "share";
  const [layer, head] = chosenHead(recording, query);
  const view = useMemo(() => new View(side), [recording]);
  const title = (name: string) => methodTitle(recording, name);

  const document = useDocument<Layer>(`api/recordings/${recording.id}/layers/${layer}`);
  const found = document.data?.layer === layer ? document.data.heads.find((one) => one.head === head) : undefined;
  const masses = useMemo(() => (found ? headMasses(found, side) : null), [found]);
  const maps = useMemo(() => (found && masses ? methods.map((name) => withMask(masses, found, name, budget)) : null), [masses, budget]);
  const blocks = maps?.[methods.indexOf(method)] ?? null;
  const values = (by === "mass" ? recording.kept_mass : recording.shares)[method]?.[budget];
  const middle = by === "mass" ? 0.75 : budgetMiddle(budgets[at]);
  const closed = (l: number, h: number) => recording.detail !== null && !recording.detail.some(([a, b]) => a === l && b === h);
  const result = recording.results.find((one) => one.method === method && String(one.budget) === budget);
  return (
    <div data-recording={recording.id}>
      <div class="controls">
        <Select label="Recording" options={options} value={recording.id} onChange={(id) => location.assign(address("explorer", id))} />
        <Select label="Method" options={methods.map((one): [string, string] => [one, title(one)])} value={method} onChange={(value) => setQuery({ method: value })} />
        <Slider label="Budget" value={at} min={0} max={budgets.length - 1} text={`${formatShare(budgets[at])} of the causal blocks`} onInput={(n) => setQuery({ budget: budgets[n]! })} />
      </div>
      <dl class="figures">
        <Figure name="KL from dense" value={formatNumber(result?.kl)} full={result?.kl} note="nats per token" />
        <Figure name="perplexity" value={result?.perplexity_gap === null || result?.perplexity_gap === undefined ? "–" : `+${formatShare(result.perplexity_gap)}`} full={result?.perplexity_gap} note="above dense" />
        <Figure name="same next token" value={formatShare(result?.same_token)} full={result?.same_token} note="as dense" />
        <Figure name="blocks kept" value={formatShare(result?.density)} full={result?.density} note="mean of all heads" />
      </dl>
      <div class="explorer">
        <section class="panel heads">
          <h2>Layers and heads</h2>
          <Choice label="Colour" options={[["share", "Blocks kept"], ["mass", "Attention kept"]]} value={by} onChange={(value) => setQuery({ by: value === "share" ? null : value })} />
          {values ? (
            <HeadGrid values={values} label={`${title(method)}: ${by === "mass" ? "attention" : "blocks"} kept by layer and head`} chosen={[layer, head]} onChoose={(l, h) => setQuery({ layer: l, head: h })} closed={closed} middle={middle} />
          ) : (
            <p class="empty">Not recorded for this method and budget.</p>
          )}
          <ShareScale what={by === "mass" ? "the attention" : "the blocks"} middle={middle} />
        </section>
        <section class="panel map">
          <h2>
            Layer {layer}, head {head}
          </h2>
          <div class="controls">
            <Choice label="Show" options={SHOWN} value={shown} onChange={(value) => setQuery({ show: value === "kept-lost" ? null : value })} />
            <ZoomButtons view={view} />
          </div>
          {document.error ? <Failure error={document.error} /> : null}
          {blocks ? (
            <>
              <BlockMap blocks={blocks} view={view} shown={shown} label={`Blocks of layer ${layer}, head ${head}: ${title(method)} at ${formatShare(budgets[at])}. Arrow keys move, plus and minus zoom, Enter pins.`} />
              <MapLegend shown={shown} blocks={blocks} />
            </>
          ) : document.error ? null : closed(layer, head) ? (
            <p class="empty">The blocks of this head were not recorded.</p>
          ) : (
            <Waiting what="the layer" />
          )}
          <p class="hint">Rows are query blocks, columns are key blocks. Click to hold a block; scroll over the map after a click, pinch, or press + and − to zoom; drag to move.</p>
        </section>
        {blocks && maps ? <Reading recording={recording} view={view} blocks={blocks} maps={maps} chosen={method} /> : null}
      </div>
      <Provenance environment={recording.environment} />
      <section class="panel">
        <h2>Methods at {formatShare(budgets[at])} of the blocks</h2>
        {maps ? (
          <div class="side-by-side">
            {methods.map((name, n) => (
              <SmallMap key={name} recording={recording} name={name} on={name === method} budget={budget} at={[layer, head]} blocks={maps[n]!} view={view} shown={shown} />
            ))}
          </div>
        ) : null}
        <MethodTable recording={recording} budget={budget} title={title} />
        <QualityChart recording={recording} title={title} />
        <Provenance environment={recording.environment} />
      </section>
    </div>
  );
}

/** The head that the address names; else a head whose blocks were recorded. */
function chosenHead(recording: Recording, query: URLSearchParams): [number, number] {
  const [layer, head] = recording.detail?.[0] ?? [Math.floor(recording.layers / 4), 0];
  const asked = (name: string, count: number, otherwise: number) => {
    const n = Number(query.get(name) ?? Number.NaN);
    return Number.isInteger(n) && n >= 0 && n < count ? n : otherwise;
  };
  return [asked("layer", recording.layers, layer), asked("head", recording.heads, head)];
}

/** A method's name; an oracle, which sees what it should guess, is called one. */
function methodTitle(recording: Recording, name: string): string {
  const title = recording.method_titles[name] ?? name;
  return recording.oracles.includes(name) && !title.startsWith("oracle") ? `${title} (oracle)` : title;
}

function headMasses(head: LayerHead, side: number): Omit<Blocks, "kept"> {
  return { side, mass: decodeBytes(head.mass), cost: decodeBytes(head.cost), costScale: head.cost_scale };
}

function withMask(masses: Omit<Blocks, "kept">, head: LayerHead, method: string, budget: string): Blocks | null {
  const bits = head.kept[method]?.[budget];
  return bits === undefined ? null : { ...masses, kept: decodeBits(bits, blockCount(masses.side)) };
}

function ZoomButtons({ view }: { view: View }) {
  const middle = (factor: number) => {
    const at = view.at ?? { row: view.y + view.span / 2, column: view.x + view.span / 2 };
    view.zoomBy(factor, at.column + 0.5, at.row + 0.5);
  };
  return (
    <div class="buttons" role="group" aria-label="Zoom">
      <button type="button" aria-label="Zoom in" onClick={() => middle(1.8)}>
        +
      </button>
      <button type="button" aria-label="Zoom out" onClick={() => middle(1 / 1.8)}>
        −
      </button>
      <button type="button" onClick={() => view.fit()}>
        Fit
      </button>
    </div>
  );
}

function MapLegend({ shown, blocks }: { shown: Shown; blocks: Blocks }) {
  useTheme();
  if (shown === "kept") {
    return (
      <p class="map-legend">
        <i class="key kept" /> kept <i class="key dropped" /> dropped
      </p>
    );
  }
  const low = 2 ** LOWEST;
  const [from, to] = shown === "cost" ? [formatNumber(low * blocks.costScale, 2), formatNumber(blocks.costScale, 2)] : [formatShare(low, 2), "100%"];
  const lost = lossMap();
  const stops = [0, 64, 128, 192, 255].map((n) => toCss(lost[n]!)).join(", ");
  return (
    <div class="map-legend">
      <ColourScale low={from} high={shown === "cost" ? `${to} (rule's units)` : `${to} of a row`} />
      {shown === "kept-lost" ? (
        <span>
          <i class="key wide" style={{ background: `linear-gradient(to right, ${stops})` }} /> dropped, by what is lost
        </span>
      ) : null}
    </div>
  );
}

interface ReadingProps {
  recording: Recording;
  view: View;
  blocks: Blocks;
  maps: (Blocks | null)[];
  chosen: string;
}

/** The block pointed at, in words. */
function Reading({ recording, view, blocks, maps, chosen }: ReadingProps) {
  const [, redraw] = useState(0);
  useEffect(() => view.listen(() => redraw((n) => n + 1)), [view]);
  const at = view.at;
  if (!at) {
    return (
      <section class="panel reading-panel" aria-label="Block">
        <h2>Block</h2>
        <p class="empty">Point at a block, or move to one with the arrow keys, to read the text on both sides and what dropping it costs.</p>
      </section>
    );
  }
  const number = blockNumber(at.row, at.column);
  const mass = decodeMass(blocks.mass[number]!);
  const cost = blocks.cost ? decodeMass(blocks.cost[number]!) * blocks.costScale : null;
  const row = rowMass(blocks, at.row);
  return (
    <section class="panel reading-panel" aria-label="Block" aria-live="polite" data-row={at.row} data-column={at.column}>
      <h2>
        Block {at.row}, {at.column} {view.pinned ? <span class="status">held</span> : null}
      </h2>
      <dl class="figures">
        <Figure name="attention" value={formatShare(mass)} full={mass} note="of the row's" />
        <Figure name="dropping costs" value={cost === null ? "–" : cost === 0 ? `under ${formatNumber(2 ** -15.9 * blocks.costScale, 2)}` : formatNumber(cost, 3)} full={cost} note="rule's units" />
        <Figure name="this row keeps" value={formatShare(row)} full={row} note="of its attention" />
      </dl>
      <ul class="kept-by">
        {recording.methods.map((name, n) => {
          const map = maps[n];
          const kept = map?.kept[number] === 1;
          return map ? (
            <li key={name} class={name === chosen ? "on" : ""}>
              <i class={kept ? "key kept" : "key dropped"} /> {methodTitle(recording, name)} {kept ? "keeps" : "drops"} it
            </li>
          ) : null;
        })}
      </ul>
      <BlockText title="Query" n={at.row} recording={recording} />
      <BlockText title="Key" n={at.column} recording={recording} />
    </section>
  );
}

function rowMass(blocks: Blocks, row: number): number {
  let [kept, all] = [0, 0];
  for (let column = 0; column <= row; column++) {
    const number = blockNumber(row, column);
    const mass = decodeMass(blocks.mass[number]!);
    all += mass;
    if (blocks.kept[number]) kept += mass;
  }
  return all ? kept / all : 0;
}

function BlockText({ title, n, recording }: { title: string; n: number; recording: Recording }) {
  const block = recording.blocks[n];
  return (
    <>
      <h3>
        {title} block {n} {block ? <span class="unit">tokens {block.start} to {block.end - 1}</span> : null}
      </h3>
      <pre class="block-text" data-text={title}>
        {block?.text ?? "The text was not recorded."}
      </pre>
    </>
  );
}

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

function SmallMap({ recording, name, on, budget, at: [layer, head], blocks, view, shown }: SmallMapProps) {
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
      {blocks ? <BlockMap blocks={blocks} view={view} shown={shown} label={`${title}, layer ${layer}, head ${head}`} /> : <p class="empty">Not recorded.</p>}
      <p class="small-facts">
        <span>
          KL <b data-name="kl" title={result?.kl?.toString()}>{formatNumber(result?.kl, 3)}</b>
        </span>
        {blocks ? <span>{formatShare(keptShare(blocks))} of this head's blocks</span> : null}
        <span>{formatShare(mass)} of its attention</span>
      </p>
    </div>
  );
}

function MethodTable({ recording, budget, title }: { recording: Recording; budget: string; title: (name: string) => string }) {
  const rows = recording.results.filter((one) => String(one.budget) === budget);
  const columns: TableColumn<MethodResult>[] = [
    { name: "method", cell: (row) => title(row.method), sort: (row) => title(row.method) },
    { name: "blocks kept", number: true, cell: (row) => formatShare(row.density), sort: (row) => row.density, full: (row) => String(row.density) },
    { name: "KL", unit: "nats per token", number: true, cell: (row) => formatNumber(row.kl), sort: (row) => row.kl, full: (row) => row.kl?.toString() },
    { name: "perplexity above dense", number: true, cell: (row) => formatShare(row.perplexity_gap), sort: (row) => row.perplexity_gap, full: (row) => row.perplexity_gap?.toString() },
    { name: "same next token", number: true, cell: (row) => formatShare(row.same_token), sort: (row) => row.same_token, full: (row) => row.same_token?.toString() },
  ];
  return <Table caption="What each method costs the model on this text" columns={columns} rows={rows} />;
}

function QualityChart({ recording, title }: { recording: Recording; title: (name: string) => string }) {
  const { dark } = useTheme();
  const lines = useMemo(
    () =>
      recording.methods.map((name, n) => {
        const of = recording.results.filter((one) => one.method === name).sort((a, b) => a.density - b.density);
        const dash = recording.oracles.includes(name) ? [6, 4] : lineDash(n);
        return { name: title(name), colour: lineColour(n), dash, x: of.map((one) => one.density), y: of.map((one) => one.kl ?? null), dots: true };
      }),
    [recording, dark],
  );
  return <Chart title="KL from dense" unit="nats per token, log scale; lower is better" lines={lines} xTitle="blocks kept" xFormat={formatShare} log height={260} />;
}
