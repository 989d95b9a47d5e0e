// What the colours of a block map mean.

import { LOWEST } from "./blocks";
import type { Shown } from "./block_map";
import { lossMap, toCss } from "./colour";
import { formatNumber, formatShare } from "./format";
import { ColourScale } from "./head_grid";
import { useTheme } from "./theme";

export function MapLegend({ shown, costScale = 1 }: { shown: Shown; costScale?: number }) {
  useTheme();
  if (shown === "kept") {
    return (
      <p class="map-legend">
        <i class="key kept" /> kept <i class="key dropped" /> dropped
      </p>
    );
  }
  const low = 2 ** LOWEST;
  const [from, to] =
    shown === "cost" ? [formatNumber(low * costScale, 2), formatNumber(costScale, 2)] : [formatShare(low, 2), "100%"];
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
