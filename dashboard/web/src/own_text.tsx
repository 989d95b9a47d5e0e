// "Your own text": posted to the running server, which computes masks and says how far it is.

import { useEffect, useState } from "preact/hooks";
import { formatNumber } from "./format";
import { Failure, Select } from "./parts";
import { address, type Route, setQuery } from "./route";
import { asError, cancelText, DocumentError, getDocument, postText } from "./source";
import type { OwnText, Site } from "./types";

const LENGTHS = ["512", "1024", "2048", "4096", "8192"];
const MOST_BYTES = 1_000_000;
const DRAFT = "xsake-text"; // a reload loses nothing

export function OwnTextForm({ site, route }: { site: Site; route: Route }) {
  const [text, setText] = useState(() => sessionStorage.getItem(DRAFT) ?? "");
  const [length, setLength] = useState("1024");
  const [error, setError] = useState<DocumentError | null>(null);
  const write = (draft: string) => {
    setText(draft);
    if (draft.length <= MOST_BYTES) sessionStorage.setItem(DRAFT, draft);
  };
  const waitedFor = route.query.get("text");
  const state = useProgress(waitedFor, setError);
  const busy = waitedFor !== null && state?.state !== "failed";

  const send = async (event: Event) => {
    event.preventDefault();
    setError(null);
    if (new Blob([text]).size > MOST_BYTES) {
      setError(
        new DocumentError("too_large", `The text has more than ${formatNumber(MOST_BYTES)} bytes. Shorten it, please.`),
      );
      return;
    }
    try {
      setQuery({ text: (await postText({ text, length: Number(length) })).id });
    } catch (problem) {
      setError(asError(problem));
    }
  };
  const cancel = async () => {
    setQuery({ text: null });
    await cancelText(waitedFor!).catch(() => undefined);
  };

  return (
    <section class="panel own-text">
      <h2>Your own text</h2>
      {site.features.own_text ? null : (
        <p class="notice">{site.features.own_text_reason ?? "This server computes no masks."}</p>
      )}
      <form onSubmit={send}>
        <label class="field">
          <span>Text; the model reads its first tokens</span>
          <textarea
            rows={6}
            value={text}
            disabled={!site.features.own_text}
            onInput={(event) => write(event.currentTarget.value)}
          />
        </label>
        <div class="controls">
          <Select
            label="Tokens"
            value={length}
            onChange={setLength}
            options={LENGTHS.map((n): [string, string] => [n, formatNumber(Number(n))])}
          />
          <button type="submit" class="primary" disabled={!site.features.own_text || busy || !text.trim()}>
            Compute masks
          </button>
          {busy ? (
            <button type="button" onClick={cancel}>
              Cancel
            </button>
          ) : null}
        </div>
      </form>
      {error ? <Failure error={error} /> : null}
      {state && busy ? <Progress state={state} /> : null}
    </section>
  );
}

function Progress({ state }: { state: OwnText }) {
  const share = state.of ? (state.done ?? 0) / state.of : 0;
  const words =
    state.state === "queued"
      ? `waiting, ${state.position ?? 0} before it`
      : `${state.stage ?? "reading the text"}${state.of ? ` (${state.done ?? 0} of ${state.of})` : ""}`;
  return (
    <div role="status" class="own-progress">
      <div
        class="progress"
        role="progressbar"
        aria-label="Masks"
        aria-valuemin={0}
        aria-valuemax={state.of ?? undefined}
        aria-valuenow={state.done ?? undefined}
      >
        <i style={{ width: `${100 * share}%` }} />
      </div>
      <p>{words}</p>
    </div>
  );
}

/** Follows a text until it is done, then opens its recording; a reload follows on. */
function useProgress(id: string | null, onError: (error: DocumentError) => void): OwnText | null {
  const [state, setState] = useState<OwnText | null>(null);
  useEffect(() => {
    setState(null);
    if (id === null) return;
    const stream = new EventSource(`api/texts/${id}/events`);
    stream.addEventListener("progress", (event) => {
      const now = JSON.parse(event.data) as OwnText;
      setState(now);
      if (now.state === "done") {
        stream.close();
        location.assign(address("explorer", now.recording ?? id));
      } else if (now.state === "failed") {
        stream.close();
        onError(new DocumentError("failed", now.error ?? "The masks could not be computed."));
        setQuery({ text: null });
      }
    });
    stream.onerror = () => {
      // A server that was restarted knows nothing of the text: ask, so that the page does not wait for ever.
      getDocument(`api/texts/${id}`).catch((problem) => {
        if (asError(problem).code === "offline") return;
        stream.close();
        onError(asError(problem));
        setQuery({ text: null });
      });
    };
    return () => stream.close();
  }, [id]);
  return state;
}
