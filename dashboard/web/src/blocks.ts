// Blocks of causal attention as recordings store them: the lower triangle row by row, masses as bytes, masks as bits.

export interface Blocks {
  /** Blocks per row and column. */
  side: number;
  /** One code per causal block: see `decodeMass`. */
  mass: Uint8Array;
  /** Like `mass`, in units of `costScale`: what dropping the block alone costs. */
  cost: Uint8Array | null;
  costScale: number;
  /** 1 where the block is kept. */
  kept: Uint8Array;
}

export function blockNumber(row: number, column: number): number {
  return (row * (row + 1)) / 2 + column;
}

export function blockCount(side: number): number {
  return blockNumber(side, 0);
}

export function decodeBytes(base64: string): Uint8Array {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
  return bytes;
}

/** One byte per block from one bit per block, the highest bit first. */
export function decodeBits(base64: string, count: number): Uint8Array {
  const packed = decodeBytes(base64);
  const bits = new Uint8Array(count);
  for (let n = 0; n < count; n++) bits[n] = (packed[n >> 3]! >> (7 - (n & 7))) & 1;
  return bits;
}

export function decodeMass(code: number): number {
  return code === 0 ? 0 : 2 ** ((code - 255) / 16);
}

export const LOWEST = -12; // log2 of the mass at the low end of the colour scale

/** Where a code lies on the colour scale, 0 to 255. */
export function toScale(code: number): number {
  const low = 255 + 16 * LOWEST;
  return code <= low ? 0 : Math.round((255 * (code - low)) / (255 - low));
}

export function keptShare(blocks: Blocks): number {
  let kept = 0;
  for (const bit of blocks.kept) kept += bit;
  return kept / blocks.kept.length;
}
