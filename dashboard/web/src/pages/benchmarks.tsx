// Every recorded benchmark as plots and tables; "not run" where nothing was recorded.

import { useMemo, useState } from "preact/hooks";
import { formatDate, formatIn, formatNumber, formatShare } from "../format";
import { Command, Failure, Provenance, Select, Waiting } from "../parts";
import { address, type Route } from "../route";
import { useDocument } from "../source";
import { Legend, SpreadPlot } from "../spread_plot";
import { Table, type TableColumn } from "../table";
import type { Benchmark, BenchmarkEntry, Cell, Column, RecordTable, Spread } from "../types";

export function BenchmarksPage({ route }: { route: Route }) {
  const { data, error } = useDocument<{ benchmarks: BenchmarkEntry[] }>("api/benchmarks");
  if (error) return <Failure error={error} />;
  if (!data) return <Waiting what="benchmarks" />;
  const chosen =
    data.benchmarks.find(({ id }) => id === route.part) ??
    data.benchmarks.find(({ state }) => state === "recorded") ??
    data.benchmarks[0];
  const go = (id: string) => location.assign(address("benchmarks", id));
  const groups = [...new Set(data.benchmarks.map(({ group }) => group))];
  return (
    <div class="with-side">
      <aside class="side" aria-label="Benchmarks">
        <div class="if-narrow">
          <Select
            label="Benchmark"
            value={chosen?.id ?? ""}
            onChange={go}
            options={data.benchmarks.map((one): [string, string] => [
              one.id,
              one.state === "recorded" ? one.title : `${one.title} (${stateWords(one)})`,
            ])}
          />
        </div>
        {groups.map((group) => (
          <section key={group} class="if-wide">
            <h2>{group}</h2>
            <ul class="benchmark-list">
              {data.benchmarks
                .filter((one) => one.group === group)
                .map((one) => (
                  <li key={one.id} data-benchmark={one.id}>
                    <a href={address("benchmarks", one.id)} aria-current={one.id === chosen?.id ? "page" : undefined}>
                      <b>{one.title}</b>
                      <span class={one.state}>{stateWords(one)}</span>
                    </a>
                  </li>
                ))}
            </ul>
          </section>
        ))}
      </aside>
      <div class="main">
        {chosen ? (
          <BenchmarkDetails key={chosen.id} entry={chosen} />
        ) : (
          <p class="empty">No benchmark is known here.</p>
        )}
      </div>
    </div>
  );
}

function stateWords({ state, device, date }: BenchmarkEntry): string {
  if (state !== "recorded") return state === "not_run" ? "not run" : "unreadable";
  return `${device ?? "unknown device"}, ${formatDate(date).slice(0, 10)}`;
}

function BenchmarkDetails({ entry }: { entry: BenchmarkEntry }) {
  const recorded = entry.state === "recorded";
  const { data, error } = useDocument<Benchmark>(recorded ? `api/benchmarks/${entry.id}` : null);
  return (
    <section class="panel" data-details={entry.id}>
      <h2>{entry.title}</h2>
      <p class="sentence">{entry.measures}</p>
      {entry.state === "not_run" ? (
        <div class="notice">
          <p>
            <b>Not run.</b> Nothing was recorded{entry.needs ? `: it needs ${entry.needs}` : ""}. To record it:
          </p>
          <Command>{entry.command}</Command>
        </div>
      ) : null}
      {entry.state === "unreadable" ? <div class="notice bad">The record cannot be read: {entry.reason}</div> : null}
      {error ? <Failure error={error} /> : null}
      {recorded && !data && !error ? <Waiting what="the record" /> : null}
      {data ? <BenchmarkBody data={data} /> : null}
    </section>
  );
}

function BenchmarkBody({ data }: { data: Benchmark }) {
  const names = useMemo(() => [...new Set(data.plots.flatMap((plot) => plot.series.map(({ name }) => name)))], [data]);
  // Ours first, so that its colour is the same on every page.
  const order = useMemo(() => {
    const ours = new Set(
      data.plots.flatMap((plot) => plot.series.filter(({ role }) => role === "ours").map(({ name }) => name)),
    );
    return [...names].sort((a, b) => Number(ours.has(b)) - Number(ours.has(a)));
  }, [data, names]);
  const colourOf = (name: string) => order.indexOf(name);
  const [off, setOff] = useState<ReadonlySet<string>>(new Set());
  const { versions, python } = data.environment;
  return (
    <>
      <Provenance environment={data.environment} />
      {versions ? (
        <p class="provenance">
          {[
            ...(python ? [`Python ${python}`] : []),
            ...Object.entries(versions).map(([name, version]) => `${name} ${version}`),
          ].join(", ")}
        </p>
      ) : null}
      {data.notes.map((note) => (
        <p key={note} class="hint">
          {note}
        </p>
      ))}
      <Legend plots={data.plots} colourOf={colourOf} off={off} onOff={setOff} />
      <div class="charts">
        {data.plots.map((plot) => (
          <SpreadPlot key={plot.id} plot={plot} colourOf={colourOf} off={off} />
        ))}
      </div>
      {data.tables.map((table) => (
        <RecordedTable key={table.id} table={table} />
      ))}
    </>
  );
}

function RecordedTable({ table }: { table: RecordTable }) {
  const columns = useMemo(() => table.columns.map((column, n) => recordColumn(column, n, table.rows)), [table]);
  return (
    <>
      <h3>{table.title}</h3>
      <Table caption={table.title} columns={columns} rows={table.rows} />
    </>
  );
}

const LONG = 24; // characters, from which on a column of text is wide

function recordColumn(column: Column, n: number, rows: Cell[][]): TableColumn<Cell[]> {
  return {
    name: column.name,
    unit: column.unit === "s" ? null : column.unit,
    number: column.kind !== "text",
    wide: rows.some((row) => String(row[n]).length > LONG && typeof row[n] === "string"),
    cell: (row) => cellText(column, row[n]),
    sort: (row) => {
      const cell = row[n];
      return isSpread(cell) ? cell.y : typeof cell === "boolean" ? String(cell) : cell;
    },
    full: (row) => {
      const cell = row[n];
      return isSpread(cell) ? String(cell.y) : typeof cell === "number" ? String(cell) : undefined;
    },
  };
}

function isSpread(cell: Cell | undefined): cell is Spread {
  return cell !== null && typeof cell === "object";
}

function cellText(column: Column, cell: Cell | undefined) {
  if (cell === null || cell === undefined) return <span class="not-run">not run</span>;
  // A time carries its unit, so that µs and s can stand in one column; other units are in the heading.
  const unit = column.unit === "s" ? "s" : null;
  if (isSpread(cell)) {
    if (cell.y === null) return <span class="not-run">not run</span>;
    return (
      <>
        {formatIn(unit, cell.y)}
        {cell.low !== null && cell.low !== undefined ? (
          <span class="quartiles"> {`${formatIn(unit, cell.low)} – ${formatIn(unit, cell.high)}`}</span>
        ) : null}
      </>
    );
  }
  if (typeof cell !== "number") return String(cell);
  return column.kind === "share" ? formatShare(cell) : unit ? formatIn(unit, cell) : formatNumber(cell);
}
