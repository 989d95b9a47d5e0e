// The frame around the pages: navigation, theme, and which page the address asks for.

import { render } from "preact";
import { useEffect } from "preact/hooks";
import { formatDate } from "./format";
import { BenchmarksPage } from "./pages/benchmarks";
import { ExplorerPage } from "./pages/explorer";
import { ReplayPage } from "./pages/replay";
import { RunsPage } from "./pages/runs";
import { TuningPage } from "./pages/tuning";
import { Failure, Waiting } from "./parts";
import { useRoute } from "./route";
import { useDocument } from "./source";
import "./style.css";
import { setTheme, type Theme, useTheme } from "./theme";
import type { Site } from "./types";

const PAGES = {
  runs: { title: "Runs", Page: RunsPage },
  explorer: { title: "Explorer", Page: ExplorerPage },
  benchmarks: { title: "Benchmarks", Page: BenchmarksPage },
  replay: { title: "Replay", Page: ReplayPage },
  tuning: { title: "Tuning", Page: TuningPage },
};
type Name = keyof typeof PAGES;
const NAMES = Object.keys(PAGES) as Name[];

function App() {
  const route = useRoute();
  const { data: site, error } = useDocument<Site>("api/site");
  // The first page with something to show, unless the address names one.
  const page = NAMES.find((name) => name === route.page) ?? NAMES.find((name) => site?.pages[name]) ?? "runs";
  useEffect(() => {
    document.title = `${PAGES[page].title} · XSAKE`;
  }, [page]);
  const { Page } = PAGES[page];
  return (
    <>
      <a class="skip" href="#main" onClick={skipToMain}>
        Skip to the page
      </a>
      <header class="top">
        <a class="brand" href="#/">
          <Logo />
          XSAKE
        </a>
        <nav aria-label="Pages">
          {NAMES.map((name) => (
            <a key={name} href={`#/${name}`} aria-current={name === page ? "page" : undefined}>
              {PAGES[name].title}
            </a>
          ))}
        </nav>
        <ThemeButton />
      </header>
      <main id="main" tabIndex={-1} class={`page-${page}`}>
        <h1 class="visually-hidden">{PAGES[page].title}</h1>
        {error ? (
          <Failure error={error} />
        ) : site || route.page ? (
          <Page key={page} route={{ ...route, page }} site={site} />
        ) : (
          <Waiting what="the site" />
        )}
      </main>
      {site ? (
        <footer>
          XSAKE {site.version}
          {site.commit ? (
            <>
              , commit <code>{site.commit.slice(0, 7)}</code>
            </>
          ) : null}
          {site.static ? `, recorded data, built ${formatDate(site.built)}` : ", live"}.{" "}
          <a href="assets/licenses.txt">Licenses</a>
        </footer>
      ) : null}
    </>
  );
}

function skipToMain(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

/** A causal mask of four by four blocks. */
function Logo() {
  const kept = ["00", "10", "11", "20", "22", "30", "33"];
  return (
    <svg class="logo" viewBox="0 0 40 40" aria-hidden="true">
      {["00", "10", "11", "20", "21", "22", "30", "31", "32", "33"].map((at) => (
        <rect
          key={at}
          x={Number(at[1]) * 10}
          y={Number(at[0]) * 10}
          width={8.6}
          height={8.6}
          rx={1.6}
          class={kept.includes(at) ? "kept" : "dropped"}
        />
      ))}
    </svg>
  );
}

const NEXT: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };
const SIGN: Record<Theme, string> = { auto: "◐", light: "○", dark: "●" };

function ThemeButton() {
  const { theme } = useTheme();
  const words = { auto: "as the system", light: "light", dark: "dark" };
  return (
    <button
      type="button"
      class="theme"
      onClick={() => setTheme(NEXT[theme])}
      aria-label={`Colours: ${words[theme]}. Change`}
      title={`Colours: ${words[theme]}`}
    >
      <span aria-hidden="true">{SIGN[theme]}</span>
    </button>
  );
}

render(<App />, document.getElementById("app")!);
