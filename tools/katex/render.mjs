// Renders formulas: reads a JSON array of {tex, display} and writes an array of {html} or {error}.
import { readFileSync } from "node:fs";
import katex from "katex";

const formulas = JSON.parse(readFileSync(0, "utf8"));
const rendered = formulas.map(({ tex, display }) => {
  try {
    const options = { displayMode: display, output: "htmlAndMathml", throwOnError: true, strict: "error" };
    return { html: katex.renderToString(tex, options) };
  } catch (error) {
    return { error: error.message };
  }
});
process.stdout.write(JSON.stringify(rendered));
