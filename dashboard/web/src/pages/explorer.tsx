// HADS explorer: what each head keeps, where its attention lies, and what other methods keep at the same budget.

import { useMemo, useRef } from "preact/hooks";
import { BlockMap, type Shown } from "../block_map";
import { Reading } from "../block_reading";
import { formatNumber, formatShare } from "../format";
import { budgetMiddle, HeadGrid, ShareScale } from "../head_grid";
import { MapLegend } from "../map_legend";
import { MethodTable, QualityChart, SmallMap, Standing } from "../methods_compared";
import { OwnTextForm } from "../own_text";
import { Choice, Command, Failure, Figure, Nothing, Provenance, Select, Slider, Waiting } from "../parts";
import { headMasses, methodTitle, withMask } from "../recording";
import { address, setQuery, type Route } from "../route";
import { isStatic, useDocument } from "../source";
import type { Layer, Recording, RecordingEntry, Site } from "../types";
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
          <p>
            A recording holds a model's attention on one text and the blocks that each method keeps.{" "}
            {isStatic
              ? "None is part of this showcase."
              : "Paste a text below to make one, or record one in a checkout of the source:"}
          </p>
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

  const closed = (l: number, h: number) =>
    recording.detail !== null && !recording.detail.some(([a, b]) => a === l && b === h);
  const document = useDocument<Layer>(`api/recordings/${recording.id}/layers/${layer}`);
  const found = document.data?.layer === layer ? document.data.heads.find((one) => one.head === head) : undefined;
  const masses = useMemo(() => (found ? headMasses(found, side) : null), [found]);
  const read = useMemo(
    () => (found && masses ? methods.map((name) => withMask(masses, found, name, budget)) : null),
    [masses, budget],
  );
  // Until another layer is read the last one stays, faded, so that nothing jumps.
  const last = useRef(read);
  last.current = read ?? (document.error || closed(layer, head) ? null : last.current);
  const maps = last.current;
  const blocks = maps?.[methods.indexOf(method)] ?? null;
  const values = (by === "mass" ? recording.kept_mass : recording.shares)[method]?.[budget];
  const middle = by === "mass" ? 0.75 : budgetMiddle(budgets[at]);
  const result = recording.results.find((one) => one.method === method && String(one.budget) === budget);
  return (
    <div data-recording={recording.id}>
      <div class="controls">
        <Select
          label="Recording"
          options={options}
          value={recording.id}
          onChange={(id) => location.assign(address("explorer", id))}
        />
        <Select
          label="Method"
          options={methods.map((one): [string, string] => [one, title(one)])}
          value={method}
          onChange={(value) => setQuery({ method: value })}
        />
        <Slider
          label="Budget"
          value={at}
          min={0}
          max={budgets.length - 1}
          text={`${formatShare(budgets[at])} of the causal blocks`}
          onInput={(n) => setQuery({ budget: budgets[n]! })}
        />
      </div>
      <dl class="figures">
        <Figure name="KL from dense" value={formatNumber(result?.kl)} full={result?.kl} note="nats per token" />
        <Figure
          name="perplexity"
          value={
            result?.perplexity_gap === null || result?.perplexity_gap === undefined
              ? "–"
              : `+${formatShare(result.perplexity_gap)}`
          }
          full={result?.perplexity_gap}
          note="above dense"
        />
        <Figure
          name="same next token"
          value={formatShare(result?.same_token)}
          full={result?.same_token}
          note="as dense"
        />
        <Figure
          name="blocks kept"
          value={formatShare(result?.density)}
          full={result?.density}
          note="mean of all heads"
        />
      </dl>
      <div class={read ? "explorer" : "explorer stale"}>
        <section class="panel heads">
          <h2>Layers and heads</h2>
          <Choice
            label="Colour"
            options={[
              ["share", "Blocks kept"],
              ["mass", "Attention kept"],
            ]}
            value={by}
            onChange={(value) => setQuery({ by: value === "share" ? null : value })}
          />
          {values ? (
            <HeadGrid
              values={values}
              label={`${title(method)}: ${by === "mass" ? "attention" : "blocks"} kept by layer and head`}
              chosen={[layer, head]}
              onChoose={(l, h) => setQuery({ layer: l, head: h })}
              closed={closed}
              middle={middle}
            />
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
            <Choice
              label="Show"
              options={SHOWN}
              value={shown}
              onChange={(value) => setQuery({ show: value === "kept-lost" ? null : value })}
            />
            <ZoomButtons view={view} />
          </div>
          {document.error ? <Failure error={document.error} /> : null}
          {blocks ? (
            <>
              <BlockMap
                blocks={blocks}
                view={view}
                shown={shown}
                label={
                  read
                    ? `Blocks of layer ${layer}, head ${head}: ${title(method)} at ${formatShare(budgets[at])}. Arrow keys move, plus and minus zoom, Enter pins.`
                    : "Reading the layer"
                }
              />
              <MapLegend shown={shown} costScale={blocks.costScale} />
            </>
          ) : document.error ? null : closed(layer, head) ? (
            <p class="empty">The blocks of this head were not recorded.</p>
          ) : (
            <Waiting what="the layer" />
          )}
          <p class="hint">
            Rows are query blocks, columns are key blocks. Click to hold a block; scroll over the map after a click,
            pinch, or press + and − to zoom; drag to move.
          </p>
        </section>
        {blocks && maps ? (
          <Reading recording={recording} view={view} blocks={blocks} maps={maps} chosen={method} />
        ) : null}
      </div>
      <Provenance environment={recording.environment} />
      <section class="panel">
        <h2>Methods at {formatShare(budgets[at])} of the blocks</h2>
        {maps ? (
          <div class="side-by-side">
            {methods.map((name, n) => (
              <SmallMap
                key={name}
                recording={recording}
                name={name}
                on={name === method}
                budget={budget}
                at={[layer, head]}
                blocks={maps[n]!}
                view={view}
                shown={shown}
              />
            ))}
          </div>
        ) : null}
        <MethodTable recording={recording} budget={budget} title={title} />
        <Standing recording={recording} title={title} />
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
