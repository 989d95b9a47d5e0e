// Tuning: studies as they go, failures with their reasons, and what the database's entries gained.

import { useEffect, useMemo, useState } from "preact/hooks";
import { Chart, type Line } from "../chart";
import { cssColour, lineColour } from "../colour";
import { formatConfig, formatDate, formatNumber, formatSeconds, formatShare, UNKNOWN } from "../format";
import { Command, Failure, Figure, Nothing, Provenance, Select, SkippedFiles, Waiting } from "../parts";
import { setQuery, type Route } from "../route";
import { isStatic, useDocument } from "../source";
import { Table, type TableColumn } from "../table";
import { useTheme } from "../theme";
import type { Database, DatabaseEntry, DatabaseRow, Study, StudyEntry, Times, Trial, Tuning } from "../types";

const AGAIN_MS = 3000; // a study that goes on is asked for again

export function TuningPage({ route }: { route: Route }) {
  const [again, setAgain] = useState(0);
  const { data, error } = useDocument<Tuning>("api/tuning", again);
  useEffect(() => {
    if (isStatic) return;
    const timer = setInterval(() => document.hidden || setAgain((n) => n + 1), AGAIN_MS);
    return () => clearInterval(timer);
  }, []);
  if (error) return <Failure error={error} />;
  if (!data) return <Waiting what="studies and databases" />;
  const study = data.studies.find(({ id }) => id === route.query.get("study")) ?? data.studies[0];
  const database = data.databases.find(({ id }) => id === route.query.get("database")) ?? data.databases[0];
  return (
    <>
      <section class="panel">
        <h2>Studies</h2>
        {data.studies.length === 0 ? (
          <Nothing title="No study here">
            <p>
              A study is the search for one call's fastest configuration.{" "}
              {isStatic
                ? "None was recorded for this showcase."
                : "Start one with its trials kept in a file, and give that file's folder to this dashboard:"}
            </p>
            {isStatic ? null : <Command>xsake autotune --storage studies.journal</Command>}
          </Nothing>
        ) : (
          <>
            <StudyTable studies={data.studies} chosen={study!.id} />
            <StudyDetails entry={study!} again={again} />
            {data.optuna_dashboard ? (
              <>
                <p class="hint">Optuna has a dashboard of its own for the same file:</p>
                <Command>{data.optuna_dashboard}</Command>
              </>
            ) : null}
          </>
        )}
        <SkippedFiles skipped={data.skipped} />
      </section>
      <section class="panel">
        <h2>Database</h2>
        {database ? (
          <>
            <DatabaseGain databases={data.databases} chosen={database.id} />
            <DatabaseDetails id={database.id} />
          </>
        ) : (
          <p class="empty">No database was found.</p>
        )}
      </section>
    </>
  );
}

function StudyTable({ studies, chosen }: { studies: StudyEntry[]; chosen: string }) {
  const columns: TableColumn<StudyEntry>[] = [
    {
      name: "study",
      wide: true,
      cell: (row) => (
        <button
          type="button"
          class="link"
          aria-pressed={row.id === chosen}
          onClick={() => setQuery({ study: row.id })}
          title={row.name}
        >
          {row.title}
        </button>
      ),
      sort: (row) => row.title,
    },
    { name: "device", cell: (row) => row.device ?? UNKNOWN, sort: (row) => row.device },
    { name: "trials", number: true, cell: (row) => formatNumber(row.trials), sort: (row) => row.trials },
    { name: "running", number: true, cell: (row) => formatNumber(row.running), sort: (row) => row.running },
    { name: "slower", number: true, cell: (row) => formatNumber(row.slower), sort: (row) => row.slower },
    {
      name: "failed",
      number: true,
      cell: (row) => formatNumber(row.failed + row.wrong),
      sort: (row) => row.failed + row.wrong,
    },
    {
      name: "best",
      unit: "of the default's time",
      number: true,
      cell: (row) => formatNumber(row.best),
      sort: (row) => row.best,
      full: (row) => row.best?.toString(),
    },
    { name: "updated", whole: true, cell: (row) => formatDate(row.updated), sort: (row) => row.updated },
  ];
  return (
    <Table columns={columns} rows={studies} caption="Studies" rowClass={(row) => (row.id === chosen ? "on" : "")} />
  );
}

function StudyDetails({ entry, again }: { entry: StudyEntry; again: number }) {
  const { dark } = useTheme();
  const { data: study, error } = useDocument<Study>(`api/tuning/studies/${entry.id}`, again);
  const lines = useMemo(() => (study ? trialLines(study) : []), [study, dark]);
  if (error) return <Failure error={error} />;
  if (!study) return <Waiting what="the study's trials" />;
  const stopped = study.trials_list.filter(({ reason }) => reason);
  return (
    <div data-study={study.id}>
      <dl class="figures">
        <Figure name="trials" value={formatNumber(study.trials)} full={study.trials} />
        <Figure name="best" value={formatNumber(study.best)} full={study.best} note="of the default's time" />
        <Figure name="best configuration" value={formatConfig(study.best_config)} />
      </dl>
      <Chart title="Time of each trial" unit="of the default's time; lower is better" lines={lines} xTitle="trial" />
      <p class="provenance">
        <code>{study.storage}</code>, on {study.device ?? "an unknown device"}, updated {formatDate(study.updated)}
      </p>
      <Table
        caption="Trials"
        columns={TRIAL_COLUMNS}
        rows={study.trials_list}
        first={12}
        rowClass={(row) => (row.number === bestTrial(study) ? "on" : "")}
      />
      {stopped.length ? (
        <p class="hint">{stopped.length} trials ended early; the table's last column says why.</p>
      ) : null}
    </div>
  );
}

const TRIAL_COLUMNS: TableColumn<Trial>[] = [
  { name: "trial", number: true, cell: (row) => formatNumber(row.number), sort: (row) => row.number },
  { name: "state", cell: (row) => <span class={`status ${row.state}`}>{row.state}</span>, sort: (row) => row.state },
  {
    name: "time",
    unit: "of the default's",
    number: true,
    cell: (row) => formatNumber(row.value),
    sort: (row) => row.value,
    full: (row) => row.value?.toString(),
  },
  { name: "rounds", number: true, cell: (row) => formatNumber(row.rounds?.length), sort: (row) => row.rounds?.length },
  { name: "took", number: true, cell: (row) => formatSeconds(row.seconds), sort: (row) => row.seconds },
  {
    name: "configuration",
    wide: true,
    cell: (row) => `${formatConfig(row.config)}${row.is_default ? " (default)" : ""}`,
  },
  { name: "reason", wide: true, cell: (row) => row.reason ?? "", sort: (row) => row.reason },
];

function bestTrial(study: Study): number | undefined {
  return study.best_so_far[study.best_so_far.length - 1]?.[0];
}

/** The best so far as a line, trials as dots by their state. */
function trialLines(study: Study): Line[] {
  const last = Math.max(0, ...study.trials_list.map(({ number }) => number));
  const stairs = study.best_so_far.flatMap(([number, value], n): [number, number][] => {
    const next = study.best_so_far[n + 1]?.[0] ?? last;
    return [[number, value], ...(next - 1e-6 > number ? [[next - 1e-6, value] as [number, number]] : [])];
  });
  const dots = (name: string, states: string[], colour: string): Line => {
    const of = study.trials_list.filter(({ state, value }) => states.includes(state) && typeof value === "number");
    return {
      name,
      colour,
      x: of.map(({ number }) => number),
      y: of.map(({ value }) => value as number),
      scattered: true,
    };
  };
  return [
    { name: "best so far", colour: lineColour(0), x: stairs.map(([x]) => x), y: stairs.map(([, y]) => y) },
    dots("complete", ["complete"], lineColour(0)),
    dots("stopped as slower", ["slower", "abandoned"], cssColour("--muted")),
    dots("failed or wrong", ["failed", "wrong", "infeasible"], lineColour(1)),
  ];
}

function DatabaseGain({ databases, chosen }: { databases: DatabaseEntry[]; chosen: string }) {
  const columns: TableColumn<DatabaseEntry>[] = [
    {
      name: "device",
      cell: (row) => (
        <button
          type="button"
          class="link"
          aria-pressed={row.id === chosen}
          onClick={() => setQuery({ database: row.id })}
        >
          {row.device}
        </button>
      ),
      sort: (row) => row.device,
    },
    { name: "file", cell: (row) => row.path, sort: (row) => row.path },
    { name: "origin", cell: (row) => row.origin, sort: (row) => row.origin },
    { name: "entries", number: true, cell: (row) => formatNumber(row.entries), sort: (row) => row.entries },
    { name: "faster", number: true, cell: (row) => formatNumber(row.gain?.faster), sort: (row) => row.gain?.faster },
    {
      name: "mean gain",
      unit: "×",
      number: true,
      cell: (row) => formatNumber(row.gain?.geometric_mean),
      sort: (row) => row.gain?.geometric_mean,
      full: (row) => row.gain?.geometric_mean?.toString(),
    },
    {
      name: "best gain",
      unit: "×",
      number: true,
      cell: (row) => formatNumber(row.gain?.best),
      sort: (row) => row.gain?.best,
      full: (row) => row.gain?.best?.toString(),
    },
  ];
  return (
    <Table caption="Databases" columns={columns} rows={databases} rowClass={(row) => (row.id === chosen ? "on" : "")} />
  );
}

const spread = (times: Times) =>
  times.low !== null && times.low !== undefined
    ? `${formatSeconds(times.median)} (${formatSeconds(times.low)} to ${formatSeconds(times.high)})`
    : formatSeconds(times.median);

const ROW_COLUMNS: TableColumn<DatabaseRow>[] = [
  { name: "call", wide: true, cell: (row) => row.call, sort: (row) => row.call },
  { name: "direction", cell: (row) => row.direction, sort: (row) => row.direction },
  { name: "backend", cell: (row) => row.implementation, sort: (row) => row.implementation },
  { name: "dtype", cell: (row) => row.dtype, sort: (row) => row.dtype },
  { name: "density", number: true, cell: (row) => formatShare(row.density), sort: (row) => row.density },
  {
    name: "gain",
    unit: "×",
    number: true,
    cell: (row) => formatNumber(row.speedup),
    sort: (row) => row.speedup,
    full: (row) => row.speedup?.toString(),
  },
  {
    name: "default → tuned, median and quartiles",
    wide: true,
    cell: (row) =>
      row.measured
        ? row.measured.map((one, n) => (
            <div key={n}>
              {one.workload}: {spread(one.default)} → {spread(one.tuned)}
            </div>
          ))
        : row.cycles
          ? `${formatNumber(row.cycles.default)} → ${formatNumber(row.cycles.tuned)} cycles by the compiler's schedule`
          : UNKNOWN,
  },
  { name: "configuration", wide: true, cell: (row) => formatConfig(row.config) },
  { name: "date", whole: true, cell: (row) => formatDate(row.date), sort: (row) => row.date },
];

function DatabaseDetails({ id }: { id: string }) {
  const { data, error } = useDocument<Database>(`api/tuning/databases/${id}`);
  const [direction, setDirection] = useState("");
  if (error) return <Failure error={error} />;
  if (!data) return <Waiting what="the database" />;
  const directions = [...new Set(data.rows.map((row) => row.direction))];
  const rows = data.rows.filter((row) => !direction || row.direction === direction);
  return (
    <div data-database={data.id}>
      <div class="controls">
        <Select
          label="Direction"
          value={direction}
          onChange={setDirection}
          options={[["", "all"], ...directions.map((name): [string, string] => [name, name])]}
        />
      </div>
      <Table caption={`Entries of ${data.path}`} columns={ROW_COLUMNS} rows={rows} by="gain" />
      {Object.entries(data.environments).map(([name, environment]) => (
        <Provenance key={name} environment={{ device: data.device, ...environment }}>
          {environment.versions ? `, ${formatConfig(environment.versions)}` : null}
        </Provenance>
      ))}
    </div>
  );
}
