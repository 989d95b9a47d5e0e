// What is shown is in the address after "#": /page/part?name=value. A reload, a link and "back" lose nothing.

import { useEffect, useState } from "preact/hooks";

export interface Route {
  page: string;
  part: string | null;
  query: URLSearchParams;
}

export function parseRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [page = "", part] = path.split("/").map(decode);
  return { page, part: part || null, query: new URLSearchParams(query) };
}

export function address(page: string, part?: string | null, query?: URLSearchParams): string {
  const path = part ? `${page}/${encodeURIComponent(part)}` : page;
  const search = query?.toString();
  return `#/${path}${search ? `?${search}` : ""}`;
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parseRoute(location.hash));
  useEffect(() => {
    const changed = () => setRoute(parseRoute(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

/** Change query values in place, without a step in the history; null removes a value. */
export function setQuery(values: Record<string, string | number | null>): void {
  const { page, part, query } = parseRoute(location.hash);
  for (const [name, value] of Object.entries(values)) {
    if (value === null) query.delete(name);
    else query.set(name, String(value));
  }
  // history.replaceState is refused on file:// by some browsers; a change of the fragment never is.
  location.replace(address(page, part, query));
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
