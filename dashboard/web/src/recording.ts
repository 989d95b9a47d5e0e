// What a recording holds of a head, ready to be drawn.

import { type Blocks, blockCount, decodeBits, decodeBytes } from "./blocks";
import type { LayerHead, Recording } from "./types";

/** A method's name; an oracle, which sees what it should guess, is called one. */
export function methodTitle(recording: Recording, name: string): string {
  const title = recording.method_titles[name] ?? name;
  return recording.oracles.includes(name) && !title.startsWith("oracle") ? `${title} (oracle)` : title;
}

export function headMasses(head: LayerHead, side: number): Omit<Blocks, "kept"> {
  return { side, mass: decodeBytes(head.mass), cost: decodeBytes(head.cost), costScale: head.cost_scale };
}

export function withMask(masses: Omit<Blocks, "kept">, head: LayerHead, method: string, budget: string): Blocks | null {
  const bits = head.kept[method]?.[budget];
  return bits === undefined ? null : { ...masses, kept: decodeBits(bits, blockCount(masses.side)) };
}
