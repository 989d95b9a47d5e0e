// Light or dark: the reader's system decides until the reader does.

import { useEffect, useState } from "preact/hooks";

export type Theme = "auto" | "light" | "dark";
const KEY = "xsake-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();
let chosen: Theme = stored();
apply();
system.addEventListener("change", apply);

export function setTheme(theme: Theme): void {
  chosen = theme;
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // A browser may refuse storage to file://; the choice then lasts until the page is left.
  }
  apply();
}

/** The reader's choice and whether the page is dark now. */
export function useTheme(): { theme: Theme; dark: boolean } {
  const [, redraw] = useState(0);
  useEffect(() => {
    const changed = () => redraw((n) => n + 1);
    listeners.add(changed);
    return () => {
      listeners.delete(changed);
    };
  }, []);
  return { theme: chosen, dark: isDark() };
}

export function isDark(): boolean {
  return chosen === "auto" ? system.matches : chosen === "dark";
}

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

function apply(): void {
  document.documentElement.dataset["theme"] = chosen;
  listeners.forEach((changed) => changed());
}

function stored(): Theme {
  try {
    const theme = localStorage.getItem(KEY);
    return theme === "light" || theme === "dark" ? theme : "auto";
  } catch {
    return "auto";
  }
}
