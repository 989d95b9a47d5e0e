// Where documents come from: the server, or the scripts beside a static page. Nothing else asks for anything.

import { useEffect, useState } from "preact/hooks";

type Documents = Record<string, unknown>;
declare global {
  interface Window {
    XSAKE_DATA?: Documents;
  }
}

export class DocumentError extends Error {
  constructor(
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

/** The showcase loads api/site.js before this script; a server's page has no documents of its own. */
export const isStatic = window.XSAKE_DATA?.["api/site"] !== undefined;

const loading = new Map<string, Promise<void>>();

/** The document `name` ("api/runs"); `query` refines it on a server, and a static page leaves it out. */
export async function getDocument<T>(name: string, query = ""): Promise<T> {
  return (isStatic ? recordedDocument(name) : request(name + query)) as Promise<T>;
}

export function postText(body: unknown): Promise<{ id: string; position: number }> {
  const headers = { "Content-Type": "application/json" };
  return request("api/texts", { method: "POST", headers, body: JSON.stringify(body) }) as Promise<{
    id: string;
    position: number;
  }>;
}

export async function cancelText(id: string): Promise<void> {
  await request(`api/texts/${id}`, { method: "DELETE" });
}

async function request(address: string, init?: RequestInit): Promise<unknown> {
  let answer: Response;
  try {
    answer = await fetch(address, init);
  } catch {
    throw new DocumentError("offline", "The server does not answer. Is `xsake dashboard` still running?");
  }
  const body = answer.status === 204 ? null : await answer.json().catch(() => undefined);
  if (answer.ok && body !== undefined) return body;
  const error = (body as { error?: { code?: string; message?: string } } | undefined)?.error;
  throw new DocumentError(
    error?.code ?? "internal",
    error?.message ?? `The server answered ${answer.status} to ${address}.`,
  );
}

async function recordedDocument(name: string): Promise<unknown> {
  const documents = window.XSAKE_DATA!;
  if (documents[name] === undefined) {
    if (!loading.has(name)) loading.set(name, loadScript(name));
    await loading.get(name);
  }
  if (documents[name] === undefined) throw new DocumentError("not_found", `${name} is not part of this showcase.`);
  return documents[name];
}

function loadScript(name: string): Promise<void> {
  return new Promise((done) => {
    const script = document.createElement("script");
    script.src = `${name}.js`;
    script.onload = script.onerror = () => {
      script.remove();
      done();
    };
    document.head.append(script);
  });
}

export interface Answer<T> {
  data: T | null;
  error: DocumentError | null;
  /** What `data` belongs to: while another document is on its way, the last one stays on the screen. */
  name: string | null;
}

/** A document by name, asked for anew whenever `name` or `again` changes; null asks for nothing. */
export function useDocument<T>(name: string | null, again: unknown = 0): Answer<T> {
  const [answer, setAnswer] = useState<Answer<T>>({ data: null, error: null, name: null });
  useEffect(() => {
    if (name === null) return;
    let wanted = true;
    getDocument<T>(name).then(
      (data) => wanted && setAnswer({ data, error: null, name }),
      (error: unknown) => wanted && setAnswer({ data: null, error: asError(error), name }),
    );
    return () => {
      wanted = false;
    };
  }, [name, again]);
  return answer;
}

export function asError(error: unknown): DocumentError {
  return error instanceof DocumentError ? error : new DocumentError("internal", String(error));
}
