// Colours for canvas and SVG: Okabe and Ito's for lines, and a map whose lightness rises steadily away from the paper.

import { isDark } from "./theme";

// [light, dark]; people with any colour vision tell them apart. Ordered by contrast on each paper; no hue comes twice.
const LINES: [string, string][] = [
  ["#0072b2", "#56b4e9"],
  ["#d55e00", "#e69f00"],
  ["#009e73", "#00b386"],
  ["#b5568c", "#cc79a7"],
  ["#b87f00", "#f0e442"],
  ["#3b4348", "#d6dcdd"],
  ["#6f4fb0", "#a58bff"],
];
const DASHES: number[][] = [[], [8, 4], [2, 3], [10, 4, 2, 4]];

export function lineColour(n: number): string {
  return LINES[n % LINES.length]![isDark() ? 1 : 0];
}

/** Lines beyond the seventh repeat a colour with another dash. */
export function lineDash(n: number): number[] {
  return DASHES[Math.floor(n / LINES.length) % DASHES.length]!;
}

/** A colour of the style sheet, for canvas: cssColour("--ink"). */
export function cssColour(name: string): string {
  const key = `${name} ${isDark()}`;
  let colour = seen.get(key);
  if (colour === undefined) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    colour = getComputedStyle(probe).color;
    probe.remove();
    seen.set(key, colour);
  }
  return colour;
}
const seen = new Map<string, string>();

/** 256 colours as 0xAABBGGRR, the layout of ImageData on little-endian machines; index 0 is next to the paper. */
export type ColourMap = Uint32Array;

const made = new Map<string, ColourMap>();

/** Yellow to indigo on light paper, indigo to yellow on dark. */
export function sequentialMap(): ColourMap {
  return isDark()
    ? makeMap("dark", (t) => [0.27 + 0.66 * t, 0.06 + 0.12 * t, 285 - 185 * t])
    : makeMap("light", (t) => [
        0.94 - 0.66 * t,
        0.05 + 0.13 * Math.sin(Math.PI * Math.min(1, t * 0.85)),
        105 + 170 * t,
      ]);
}

/** The map of what is lost: vermillion, from the paper's tone up. */
export function lossMap(): ColourMap {
  return isDark()
    ? makeMap("lost-dark", (t) => [0.235 + 0.44 * t, 0.01 + 0.18 * t, 45])
    : makeMap("lost-light", (t) => [0.975 - 0.4 * t, 0.005 + 0.19 * t, 45]);
}

/** Lightness, chroma and hue of OKLCH along t from 0 to 1. */
function makeMap(key: string, at: (t: number) => [number, number, number]): ColourMap {
  let map = made.get(key);
  if (!map) {
    map = Uint32Array.from({ length: 256 }, (_, n) => {
      const [r, g, b] = oklch(...at(n / 255));
      return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
    });
    made.set(key, map);
  }
  return map;
}

function oklch(lightness: number, chroma: number, hue: number): [number, number, number] {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear: [number, number, number] = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    const clipped = Math.min(1, Math.max(0, x));
    return Math.round(255 * (clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055));
  }) as [number, number, number];
}

export function toCss(pixel: number): string {
  return `rgb(${pixel & 255}, ${(pixel >> 8) & 255}, ${(pixel >> 16) & 255})`;
}

/** A colour of the style sheet as a pixel of ImageData. */
export function toPixel(css: string): number {
  const [r = 0, g = 0, b = 0] = (css.match(/[\d.]+/g) ?? []).map(Number);
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}
