// Training replay: scrub through a recorded run and see loss, density and masks at each checkpoint, dense beside sparse.

import { useEffect, useMemo, useState } from "preact/hooks";
import { type Blocks, blockCount, blockNumber, decodeBits, decodeBytes, decodeMass, keptShare } from "../blocks";
import { BlockMap, type Shown } from "../block_map";
import { Chart, type Line } from "../chart";
import { lineColour } from "../colour";
import { formatNumber, formatShare } from "../format";
import { budgetMiddle, HeadGrid, ShareScale } from "../head_grid";
import { MapLegend } from "../map_legend";
import { Choice, Failure, Figure, Nothing, Provenance, Select, Slider, Waiting } from "../parts";
import { address, setQuery, type Route } from "../route";
import { smooth } from "../smooth";
import { useDocument } from "../source";
import { useTheme } from "../theme";
import type { Curve, Densities, Frame, Replay, ReplayEntry } from "../types";
import { View } from "../view";

const FRAME_MS = 700;
const SHOWN: [Shown, string][] = [
  ["kept-lost", "Kept, lost"],
  ["mass", "Attention"],
  ["kept", "Kept"],
];

export function ReplayPage({ route }: { route: Route }) {
  const list = useDocument<{ replays: ReplayEntry[] }>("api/replays");
  const id = route.part ?? list.data?.replays[0]?.id ?? null;
  const { data, error, name } = useDocument<Replay>(id === null ? null : `api/replays/${id}`);
  if (list.error) return <Failure error={list.error} />;
  if (error) return <Failure error={error} />;
  if (list.data && id === null) {
    return (
      <Nothing title="No replay yet">
        <p>
          A replay shows a recorded training run checkpoint by checkpoint: loss, density and masks, dense beside sparse.
          None was recorded here.
        </p>
      </Nothing>
    );
  }
  if (!data || name !== `api/replays/${id}`) return <Waiting what="the replay" />;
  const options = (list.data?.replays ?? []).map((one): [string, string] => [one.id, one.title]);
  return <Scrub key={data.id} replay={data} route={route} options={options} />;
}

function Scrub({ replay, route, options }: { replay: Replay; route: Route; options: [string, string][] }) {
  const { checkpoints } = replay;
  const last = checkpoints.length - 1;
  const asked = checkpoints.indexOf(Number(route.query.get("step") ?? Number.NaN));
  const at = asked >= 0 ? asked : last;
  const step = checkpoints[at]!;
  const [layer, head] = [
    bounded(route.query.get("layer"), replay.layers),
    bounded(route.query.get("head"), replay.heads),
  ];
  const shown = SHOWN.find(([one]) => one === route.query.get("show"))?.[0] ?? "kept-lost";
  const [playing, setPlaying] = useState(false);
  const view = useMemo(() => new View(replay.side), [replay]);
  const go = (n: number) => setQuery({ step: checkpoints[Math.min(last, Math.max(0, n))]! });

  useEffect(() => {
    if (!playing) return;
    if (at >= last) {
      setPlaying(false);
      return;
    }
    const timer = setTimeout(() => go(at + 1), FRAME_MS);
    return () => clearTimeout(timer);
  }, [playing, at]);

  const play = () => {
    if (!playing && at >= last) go(0);
    setPlaying(!playing);
  };
  return (
    <div data-replay={replay.id}>
      <h2 class="page-title">{replay.title}</h2>
      <div class="controls scrubber">
        {options.length > 1 ? (
          <Select
            label="Replay"
            options={options}
            value={replay.id}
            onChange={(id) => location.assign(address("replay", id))}
          />
        ) : null}
        <button type="button" class="primary" onClick={play}>
          {playing ? "Pause" : "Play"}
        </button>
        <Slider
          label="Checkpoint after step"
          value={at}
          min={0}
          max={last}
          text={formatNumber(step)}
          onInput={(n) => (setPlaying(false), go(n))}
        />
      </div>
      <dl class="figures">
        {replay.runs.map((run) => {
          const loss = valueAt(replay.series[run.id]?.["held_out_loss"], step);
          return (
            <Figure
              key={run.id}
              name={run.title}
              value={formatNumber(loss)}
              full={loss}
              note="held-out loss, nats per token"
            />
          );
        })}
      </dl>
      <div class="charts">
        <ReplayChart replay={replay} metric="loss" title="Loss" step={step} />
        <ReplayChart replay={replay} metric="held_out_loss" title="Held-out loss" step={step} />
      </div>
      <section class="panel">
        <h2>
          What layer {layer}, head {head} attends to after step {formatNumber(step)}
        </h2>
        <div class="controls">
          <Choice
            label="Show"
            options={SHOWN}
            value={shown}
            onChange={(value) => setQuery({ show: value === "kept-lost" ? null : value })}
          />
        </div>
        <div class="side-by-side large">
          {replay.runs.map((run) => (
            <RunFrame
              key={run.id}
              replay={replay}
              run={run}
              step={step}
              layer={layer}
              head={head}
              shown={shown}
              view={view}
            />
          ))}
        </div>
        <MapLegend shown={shown} />
        <ReadingText replay={replay} view={view} />
        <Provenance environment={replay.environment} />
      </section>
    </div>
  );
}

function bounded(text: string | null, count: number): number {
  const n = Math.floor(Number(text));
  return n >= 0 && n < count ? n : 0;
}

/** The last value at or before a step. */
function valueAt(curve: Curve | undefined, step: number): number | null {
  let value: number | null = null;
  for (let n = 0; n < (curve?.step.length ?? 0) && curve!.step[n]! <= step; n++) value = curve!.value[n] ?? value;
  return value;
}

function ReplayChart({ replay, metric, title, step }: { replay: Replay; metric: string; title: string; step: number }) {
  const { dark } = useTheme();
  const lines = useMemo(
    () =>
      replay.runs.flatMap(({ id, title: name }, n): Line[] => {
        const curve = replay.series[id]?.[metric];
        if (!curve) return [];
        const look = { name, colour: lineColour(n), x: curve.step };
        if (curve.step.length < 60) return [{ ...look, y: curve.value, dots: true }];
        return [
          { ...look, y: curve.value, faint: true },
          { ...look, y: smooth(curve.value, 0.7) },
        ];
      }),
    [replay, metric, dark],
  );
  return <Chart title={title} unit="nats per token" lines={lines} xTitle="step" marker={step} group="replay" />;
}

interface FrameProps {
  replay: Replay;
  run: Replay["runs"][number];
  step: number;
  layer: number;
  head: number;
  shown: Shown;
  view: View;
}

/** The frame of the last checkpoint at or before `step`; frames that follow are asked for ahead of the scrubber. */
function RunFrame({ replay, run, step, layer, head, shown, view }: FrameProps) {
  const frames = replay.frames[run.id] ?? [];
  const at = frames.findLastIndex((frame) => frame.step <= step);
  const { data: frame, error } = useDocument<Frame>(frames[at]?.name ?? null);
  useDocument<Frame>(frames[at + 1]?.name ?? null);
  const middle = budgetMiddle(Math.min(...replay.runs.map(({ density }) => density ?? 1))); // one scale for all runs
  const found = frame?.heads.find((one) => one.layer === layer && one.head === head);
  const blocks = useMemo((): Blocks | null => {
    if (!frame || !found) return null;
    return {
      side: frame.side,
      mass: decodeBytes(found.mass),
      cost: null,
      costScale: 1,
      kept: decodeBits(found.kept, blockCount(frame.side)),
    };
  }, [found]);
  const shares = useMemo(
    () => densitiesAt(replay.densities[run.id], step) ?? frameShares(frame, replay),
    [replay, run.id, step, frame],
  );
  return (
    <div class="small-map" data-frame={run.id}>
      <h3>{run.title}</h3>
      {error ? <Failure error={error} /> : null}
      {blocks ? (
        <>
          <BlockMap
            blocks={blocks}
            view={view}
            shown={shown}
            label={`${run.title}, layer ${layer}, head ${head}, after step ${step}`}
          />
          <p class="small-facts">
            <span>step {formatNumber(frame!.step)}</span>
            <span>keeps {formatShare(keptShare(blocks))} of the blocks</span>
            <span>and {formatShare(keptMass(blocks))} of the attention</span>
          </p>
        </>
      ) : frames.length === 0 ? (
        <p class="empty">No masks were recorded.</p>
      ) : error ? null : (
        <Waiting what="the checkpoint" />
      )}
      {shares ? (
        <>
          <HeadGrid
            values={shares}
            label={`${run.title}: share of blocks kept by layer and head`}
            chosen={[layer, head]}
            onChoose={(l, h) => setQuery({ layer: l, head: h })}
            middle={middle}
          />
          <ShareScale what="the blocks kept" middle={middle} />
        </>
      ) : null}
    </div>
  );
}

function densitiesAt(densities: Densities[] | undefined, step: number): number[][] | null {
  return densities?.findLast((one) => one.step <= step)?.layers ?? null;
}

function frameShares(frame: Frame | null, { layers, heads }: Replay): number[][] | null {
  if (!frame) return null;
  const shares = Array.from({ length: layers }, () => Array.from({ length: heads }, () => 0));
  for (const { layer, head, share } of frame.heads) shares[layer]![head] = share ?? 1;
  return shares;
}

function keptMass(blocks: Blocks): number {
  let [kept, all] = [0, 0];
  for (let n = 0; n < blocks.mass.length; n++) {
    const mass = decodeMass(blocks.mass[n]!);
    all += mass;
    if (blocks.kept[n]) kept += mass;
  }
  return all ? kept / all : 0;
}

/** The text on both sides of the block pointed at, in any of the maps. */
function ReadingText({ replay, view }: { replay: Replay; view: View }) {
  const [, redraw] = useState(0);
  useEffect(() => view.listen(() => redraw((n) => n + 1)), [view]);
  const at = view.at;
  if (!at) return <p class="hint">Point at a block to read the text on both sides.</p>;
  return (
    <div class="two-texts" data-block={blockNumber(at.row, at.column)}>
      <div>
        <h3>Query block {at.row}</h3>
        <pre class="block-text">{replay.text[at.row]}</pre>
      </div>
      <div>
        <h3>Key block {at.column}</h3>
        <pre class="block-text">{replay.text[at.column]}</pre>
      </div>
    </div>
  );
}
