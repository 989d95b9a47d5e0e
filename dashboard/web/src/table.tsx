// A table that sorts by a click on a heading, and shows the first rows of a long list until more are asked for.

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";

export interface TableColumn<Row> {
  name: string;
  unit?: string | null | undefined;
  /** Numbers are set to the right. */
  number?: boolean;
  /** Long text, which gets room even where the table must be scrolled. */
  wide?: boolean;
  /** Never broken over lines, such as a date. */
  whole?: boolean;
  cell: (row: Row) => ComponentChildren;
  /** What the column sorts by; without it the column does not sort. */
  sort?: (row: Row) => number | string | null | undefined;
  /** The whole value, shown on hover. */
  full?: (row: Row) => string | undefined;
}

interface Props<Row> {
  columns: TableColumn<Row>[];
  rows: Row[];
  caption: string;
  first?: number;
  /** The column by which rows are sorted at first, downwards; without it they come as they are. */
  by?: string;
  rowClass?: (row: Row) => string;
}

export function Table<Row>({ columns, rows, caption, first = 25, by, rowClass }: Props<Row>) {
  const [order, setOrder] = useState<{ column: number; down: boolean } | null>(() =>
    by ? { column: columns.findIndex(({ name }) => name === by), down: true } : null,
  );
  const [all, setAll] = useState(false);
  const sorted = useMemo(() => sortRows(rows, columns, order), [rows, columns, order]);
  const few = useNarrow() ? Math.min(first, FIRST_CARDS) : first;
  const shown = all ? sorted : sorted.slice(0, few);
  const heading = (column: TableColumn<Row>, n: number) => {
    const title = (
      <>
        {column.name}
        {column.unit ? <span class="unit"> {column.unit}</span> : null}
      </>
    );
    if (!column.sort) return title;
    const down = order?.column === n && !order.down;
    return (
      <button type="button" onClick={() => setOrder({ column: n, down })}>
        {title}
        <span aria-hidden="true">{order?.column === n ? (order.down ? " ↓" : " ↑") : ""}</span>
      </button>
    );
  };
  return (
    <div class={columns.length > 3 ? "table many" : "table"}>
      <div class="scroll" tabIndex={0} role="region" aria-label={caption}>
        <table>
          <caption>{caption}</caption>
          <thead>
            <tr>
              {columns.map((column, n) => (
                <th
                  key={column.name}
                  scope="col"
                  class={column.number ? "number" : ""}
                  aria-sort={order?.column === n ? (order.down ? "descending" : "ascending") : undefined}
                >
                  {heading(column, n)}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row, n) => (
              <tr key={n} class={rowClass?.(row)}>
                {columns.map((column) => (
                  <td
                    key={column.name}
                    class={column.number ? "number" : column.wide ? "wide" : column.whole ? "whole" : ""}
                    data-column={column.unit ? `${column.name} (${column.unit})` : column.name}
                    title={column.full?.(row)}
                  >
                    {column.cell(row)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {rows.length > few ? (
        <button type="button" class="more" onClick={() => setAll(!all)}>
          {all ? `Show the first ${few}` : `Show all ${rows.length} rows`}
        </button>
      ) : null}
    </div>
  );
}

const NARROW = window.matchMedia("(max-width: 560px)"); // where a row of many columns is a card, as in style.css
const FIRST_CARDS = 8;

function useNarrow(): boolean {
  const [narrow, setNarrow] = useState(NARROW.matches);
  useEffect(() => {
    const changed = () => setNarrow(NARROW.matches);
    NARROW.addEventListener("change", changed);
    return () => NARROW.removeEventListener("change", changed);
  }, []);
  return narrow;
}

/** Unknown values come last, up or down. */
function sortRows<Row>(
  rows: Row[],
  columns: TableColumn<Row>[],
  order: { column: number; down: boolean } | null,
): Row[] {
  const key = order && columns[order.column]?.sort;
  if (!order || !key) return rows;
  return [...rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === null || x === undefined) return y === null || y === undefined ? 0 : 1;
    if (y === null || y === undefined) return -1;
    const way = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return order.down ? -way : way;
  });
}
