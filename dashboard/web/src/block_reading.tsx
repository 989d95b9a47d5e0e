// The block pointed at, in words: both texts, its mass, what dropping it costs, and who keeps it.

import { useEffect, useState } from "preact/hooks";
import { type Blocks, blockNumber, decodeMass } from "./blocks";
import { formatNumber, formatShare } from "./format";
import { Figure } from "./parts";
import { methodTitle } from "./recording";
import type { Recording } from "./types";
import type { View } from "./view";

interface ReadingProps {
  recording: Recording;
  view: View;
  blocks: Blocks;
  maps: (Blocks | null)[];
  chosen: string;
}

export function Reading({ recording, view, blocks, maps, chosen }: ReadingProps) {
  const [, redraw] = useState(0);
  useEffect(() => view.listen(() => redraw((n) => n + 1)), [view]);
  const at = view.at;
  if (!at) {
    return (
      <section class="panel reading-panel" aria-label="Block">
        <h2>Block</h2>
        <p class="empty">
          Point at a block, or move to one with the arrow keys, to read the text on both sides and what dropping it
          costs.
        </p>
      </section>
    );
  }
  const number = blockNumber(at.row, at.column);
  const mass = decodeMass(blocks.mass[number]!);
  const cost = blocks.cost ? decodeMass(blocks.cost[number]!) * blocks.costScale : null;
  const row = rowMass(blocks, at.row);
  return (
    <section
      class="panel reading-panel"
      aria-label="Block"
      aria-live="polite"
      data-row={at.row}
      data-column={at.column}
    >
      <h2>
        Block {at.row}, {at.column} {view.pinned ? <span class="status">held</span> : null}
      </h2>
      <dl class="figures">
        <Figure name="attention" value={formatShare(mass)} full={mass} note="of the row's" />
        <Figure
          name="dropping costs"
          value={
            cost === null
              ? "–"
              : cost === 0
                ? `under ${formatNumber(2 ** -15.9 * blocks.costScale, 2)}`
                : formatNumber(cost, 3)
          }
          full={cost}
          note="rule's units"
        />
        <Figure name="this row keeps" value={formatShare(row)} full={row} note="of its attention" />
      </dl>
      <ul class="kept-by">
        {recording.methods.map((name, n) => {
          const map = maps[n];
          const kept = map?.kept[number] === 1;
          return map ? (
            <li key={name} class={name === chosen ? "on" : ""}>
              <i class={kept ? "key kept" : "key dropped"} /> {methodTitle(recording, name)} {kept ? "keeps" : "drops"}{" "}
              it
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
        {title} block {n}{" "}
        {block ? (
          <span class="unit">
            tokens {block.start} to {block.end - 1}
          </span>
        ) : null}
      </h3>
      <pre class="block-text" data-text={title}>
        {block?.text ?? "The text was not recorded."}
      </pre>
    </>
  );
}
