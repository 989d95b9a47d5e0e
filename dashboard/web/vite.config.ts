import { readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

/** The licenses of what is bundled, beside the bundle. */
const licenses: Plugin = {
  name: "licenses",
  generateBundle() {
    const text = ["preact", "uplot"].map((name) => {
      const about = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
      return `${name} ${about.version}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`;
    });
    this.emitFile({ type: "asset", fileName: "assets/licenses.txt", source: text.join("\n\n") });
  },
};

// One classic script and one style sheet with fixed names: the page also works from file://, where modules are refused.
export default defineConfig({
  base: "./",
  plugins: [licenses],
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: "../static",
    emptyOutDir: true,
    target: ["chrome123", "firefox121", "safari17.5"], // light-dark()
    modulePreload: false,
    cssCodeSplit: false,
    reportCompressedSize: false,
    rolldownOptions: {
      input: "src/main.tsx",
      output: { format: "iife", entryFileNames: "assets/app.js", assetFileNames: "assets/app[extname]" },
    },
  },
});
