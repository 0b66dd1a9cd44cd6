// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Opens the page with chromium, and fails if the page does not do what its user expects.
// Arguments: the URL with the token, and a directory for screenshots.

import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [url, shots] = process.argv.slice(2);
const manifest = process.env.SLUICE_MANIFEST;
const origin = new URL(url).origin;
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"], // root has no sandbox of chromium
});
try {
  const page = await browser.newPage({ viewport: { width: 1200, height: 700 } });
  const problems = [];
  page.on("console", (m) => m.type() === "error" && problems.push(m.text()));
  page.on("pageerror", (e) => problems.push(String(e)));
  page.on("request", (r) => r.url().startsWith(origin + "/") || problems.push("request to " + r.url()));
  page.setDefaultTimeout(30_000);

  // The flows are there, and the token is not in the address bar.
  await page.goto(url);
  await page.waitForFunction(() => document.querySelectorAll("#flows tr").length === 100);
  assert.equal(page.url(), origin + "/");
  assert.match(await page.textContent("#status"), /^100 flows; following$/);

  // The filters of the CLI.
  const show = async (filter, rows) => {
    await page.fill("#filter", filter);
    await page.click("#query button");
    await page.waitForFunction((n) => document.querySelectorAll("#flows tr").length === n &&
      document.querySelector("#status").textContent.endsWith("complete"), rows);
  };
  await show("--verdict DROPPED --last 50", 10);
  assert.deepEqual(new Set(await page.$$eval("#flows tr", (rows) => rows.map((r) => r.cells[4].textContent))),
    new Set(["DROPPED"]));
  await show("--pod shop/client --not --verdict FORWARDED --since 1h", 10);
  await show("--to-port 8080 --from-namespace shop --first 7", 7);
  await show("--ip 192.0.2.1", 0);
  console.log("filtered");

  // A drop, with its rule and the lines of the manifest.
  await show("--verdict DROPPED --last 50", 10);
  await page.click("#flows tr:first-child");
  await page.waitForSelector("#flow pre.manifest");
  const text = await page.textContent("#flow");
  for (const part of ["DROPPED: policy-denied", "Ingress denied by NetworkPolicy shop/web spec.ingress[1], revision 7",
    "The policy now, revision 9, from file web.yaml"]) {
    assert.ok(text.includes(part), `${part} is missing in ${text}`);
  }
  assert.deepEqual((await page.$$eval("#flow mark", (m) => m.map((l) => l.textContent.trimEnd()))),
    manifest.split("\n").slice(8, 11));
  await page.screenshot({ path: shots + "/drop.png" });
  console.log("explained a drop");

  // The map.
  await show("--last 100", 100);
  await page.click("nav button[data-view=map]");
  await page.waitForSelector("#graph g[data-node='shop/client']");
  assert.match(await page.textContent("#graph path[data-from='shop/client'] title"),
    /^shop\/client to 10.244.0.3: 90 allowed, 10 denied$/);
  await page.screenshot({ path: shots + "/map.png" });
  console.log("drew the map");

  // The effect of a pasted policy.
  await page.click("nav button[data-view=policy]");
  await page.fill("#manifests", manifest);
  await page.click("#try button");
  await page.waitForSelector("#changes tr");
  assert.deepEqual(await page.$$eval("#changes td", (c) => c.map((x) => x.textContent)),
    ["app=web", "ingress", "app=client", "tcp 8080", "deny", "allow"]);
  await page.screenshot({ path: shots + "/policy.png" });
  assert.deepEqual(problems, []);
  await page.fill("#manifests", "kind: Pod");
  await page.click("#try button");
  await page.waitForFunction(() => document.querySelector("#result").textContent === "document 1: not the policy of the test");
  console.log("compared a policy");

  // What the page refuses, and a tab without the token.
  await page.click("nav button[data-view=table]");
  await page.fill("#filter", "--colour red");
  await page.click("#query button");
  await page.waitForFunction(() => document.querySelector("#status").textContent.includes("--colour"));
  const other = await (await browser.newContext()).newPage();
  await other.goto(origin);
  await other.waitForFunction(() => document.querySelector("#status").textContent.includes("sluice hubble ui"));
  assert.equal((await other.$$("#flows tr")).length, 0);
  console.log("refused what is wrong");
} finally {
  await browser.close();
}
