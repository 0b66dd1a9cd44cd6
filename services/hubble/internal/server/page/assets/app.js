// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors
import { parse } from "./filter.js";
import { nameOf, portsOf, reasonOf } from "./flow.js";
import { draw, edges } from "./graph.js";
// mostFlows is the number of flows in the table. Older ones make room.
const mostFlows = 1000;
const $ = (id) => document.getElementById(id);
// The token stays in this tab. The address bar must not show it, because people share addresses and screenshots.
if (location.hash.length > 1) {
    sessionStorage.setItem("token", location.hash.slice(1));
    history.replaceState(null, "", location.pathname);
}
function request(path, init = {}) {
    return fetch(path, { ...init, headers: { Authorization: "Bearer " + (sessionStorage.getItem("token") ?? "") } });
}
// lines calls f with each JSON object of an answer.
async function lines(response, f) {
    if (!response.ok || !response.body) {
        throw new Error((await response.text()).trim());
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
        const { value, done } = await reader.read();
        const parts = (rest + (value ?? "")).split("\n");
        rest = parts.pop() ?? "";
        for (const line of parts) {
            const object = JSON.parse(line);
            if (typeof object.error === "string") {
                throw new Error(object.error);
            }
            f(object);
        }
        if (done) {
            return;
        }
    }
}
function status(text, error = false) {
    $("status").textContent = text;
    $("status").className = error ? "error" : "";
}
function cells(row, ...texts) {
    for (const text of texts) {
        row.insertCell().textContent = text; // textContent: names and labels come from pods
    }
}
const shown = [];
function add(flow) {
    const row = document.createElement("tr");
    const { protocol, from, to } = portsOf(flow);
    row.className = flow.verdict ?? "";
    cells(row, (flow.time ?? "").replace("T", " ").slice(0, 23), nameOf(flow.source, flow.IP?.source) + from, nameOf(flow.destination, flow.IP?.destination) + to, protocol, flow.verdict ?? "", reasonOf(flow));
    row.addEventListener("click", () => void explain(flow, row));
    $("flows").prepend(row);
    shown.push({ flow, row });
    while (shown.length > mostFlows) {
        shown.shift().row.remove();
    }
    redraw();
}
let drawing = false;
// redraw draws the map if it is visible, at most once in a frame.
function redraw() {
    if (drawing || $("map").hidden) {
        return;
    }
    drawing = true;
    requestAnimationFrame(() => {
        drawing = false;
        $("graph").replaceChildren(draw(edges(shown.map((s) => s.flow))));
    });
}
let running;
async function show() {
    running?.abort();
    const mine = (running = new AbortController());
    $("flow").hidden = true;
    shown.splice(0).forEach((s) => s.row.remove());
    redraw();
    let lost = 0, count = 0;
    const say = (state) => status(`${count} flows${lost > 0 ? `, at least ${lost} lost` : ""}; ${state}`);
    try {
        const query = parse($("filter").value, Date.now());
        if (!query.number) {
            query.number = query.since || query.follow ? undefined : "500";
        }
        $("stop").hidden = !query.follow;
        say(query.follow ? "following" : "reading");
        const response = await request("/api/flows", { method: "POST", body: JSON.stringify(query), signal: mine.signal });
        await lines(response, (m) => {
            if (m.flow) {
                count++;
                add(m.flow);
            }
            else if (m.lost_events) {
                lost += Number(m.lost_events.num_events_lost ?? 1);
            }
            say(query.follow ? "following" : "reading");
        });
        say("complete");
    }
    catch (e) {
        if (mine.signal.aborted) {
            if (mine === running) {
                say("stopped");
            }
            return;
        }
        status(e instanceof Error ? e.message : String(e), true);
    }
    $("stop").hidden = true;
}
// marked returns the lines of a manifest. The lines of the rule, such as "spec.ingress[0]", are marked.
export function marked(manifest, path) {
    const all = manifest.split("\n"), match = /(ingress|egress)(Deny)?\[(\d+)\]/.exec(path);
    let from = -1, to = -1;
    if (match) {
        const key = match[1] + (match[2] ?? "");
        const head = all.findIndex((l) => new RegExp(`^\\s*(- )?${key}:`).test(l));
        let index = -1, indent = -1;
        for (let i = head + 1; head >= 0 && i < all.length; i++) {
            const l = all[i], depth = l.search(/\S/);
            if (depth < 0) {
                continue;
            }
            const item = l.trimStart().startsWith("- ");
            indent = indent < 0 && item ? depth : indent;
            if (depth < indent || (depth === indent && !item)) {
                to = index === Number(match[3]) ? i : to;
                break;
            }
            if (depth === indent && item) {
                if (index === Number(match[3])) {
                    to = i;
                    break;
                }
                index++;
                from = index === Number(match[3]) ? i : from;
            }
        }
        to = from >= 0 && to < 0 ? all.length : to;
    }
    return all.map((l, i) => {
        const e = document.createElement(i >= from && i < to && from >= 0 ? "mark" : "span");
        e.textContent = l;
        return e;
    });
}
function paragraph(text) {
    const p = document.createElement("p");
    p.textContent = text;
    return p;
}
// explain shows a flow, the rules that decided, and the manifests of their policies.
async function explain(flow, row) {
    document.querySelector("tr.chosen")?.classList.remove("chosen");
    row.classList.add("chosen");
    const aside = $("flow"), title = document.createElement("h2");
    title.textContent = `${flow.verdict}${reasonOf(flow) && ": " + reasonOf(flow)}`;
    const ends = portsOf(flow);
    aside.replaceChildren(title, paragraph(`${nameOf(flow.source, flow.IP?.source)}${ends.from} to ` +
        `${nameOf(flow.destination, flow.IP?.destination)}${ends.to}, ${ends.protocol}, ${flow.traffic_direction ?? ""}`));
    aside.hidden = false;
    const sides = [
        ["Egress denied by", "egressRules", flow.egress_denied_by ?? []],
        ["Ingress denied by", "ingressRules", flow.ingress_denied_by ?? []],
        ["Egress allowed by", "egressRules", flow.egress_allowed_by ?? []],
        ["Ingress allowed by", "ingressRules", flow.ingress_allowed_by ?? []],
    ];
    const known = new Set();
    for (const [text, extension, policies] of sides) {
        const rules = flow.extensions?.value?.[extension] ?? [];
        for (const p of policies) {
            const name = `${p.kind} ${p.namespace ? p.namespace + "/" : ""}${p.name}`;
            const rule = rules.find((r) => r.startsWith(name + " ")) ?? name;
            aside.append(paragraph(`${text} ${rule}, revision ${p.revision ?? "unknown"}`));
            if (!known.has(name)) {
                known.add(name);
                await manifest(aside, p, rule);
            }
        }
    }
    if (known.size === 0) {
        aside.append(paragraph("No rule decided about this packet."));
    }
    const raw = document.createElement("details"), summary = document.createElement("summary"), pre = document.createElement("pre");
    summary.textContent = "All fields";
    pre.textContent = JSON.stringify(flow, null, 1);
    raw.append(summary, pre);
    aside.append(raw);
}
async function manifest(to, p, rule) {
    const query = new URLSearchParams({ kind: p.kind ?? "", namespace: p.namespace ?? "", name: p.name ?? "" });
    let found = 0;
    try {
        await lines(await request("/api/policies?" + query), (m) => {
            found++;
            const pre = document.createElement("pre");
            pre.className = "manifest";
            pre.append(...marked(String(m.manifest).trimEnd(), rule));
            to.append(paragraph(`The policy now, revision ${m.revision}, from ${m.source} ${m.origin ?? ""}:`), pre);
        });
        if (found === 0) {
            to.append(paragraph("This policy no longer exists."));
        }
    }
    catch (e) {
        to.append(paragraph(e instanceof Error ? e.message : String(e)));
    }
}
const action = (a) => (a ?? "ACTION_UNSPECIFIED").replace("ACTION_", "").toLowerCase();
const protocols = { 1: "icmp", 6: "tcp", 17: "udp", 58: "icmpv6", 132: "sctp" };
function portsText(p) {
    const first = p.first_protocol ?? 0, last = p.last_protocol ?? 0;
    if (first !== last) {
        return "all";
    }
    const protocol = protocols[first] ?? String(first), from = p.first_port ?? 0, to = p.last_port ?? 0;
    return from === to ? `${protocol} ${from}` : from === 0 && to === 65535 ? protocol : `${protocol} ${from}-${to}`;
}
function labelsText(labels) {
    const own = (labels ?? []).filter((l) => !String(l.key).startsWith("io.cilium."));
    return own.map((l) => (l.value ? `${l.key}=${l.value}` : l.key)).join(", ");
}
async function compare() {
    const rows = $("changes"), result = $("result");
    rows.replaceChildren();
    result.className = "";
    result.textContent = "Comparing";
    let count = 0;
    try {
        const response = await request("/api/diff", { method: "POST", body: $("manifests").value });
        await lines(response, (m) => {
            for (const p of m.ports ?? []) {
                count++;
                const row = document.createElement("tr");
                const peers = (m.peers ?? []).map((q) => labelsText(q.labels) || q.prefix || "others").join("; ");
                cells(row, labelsText(m.subject_labels), String(m.direction ?? "").replace("DIRECTION_", "").toLowerCase(), peers, portsText(p), action(p.before), action(p.after));
                rows.append(row);
            }
        });
        result.textContent = count === 0 ? "No verdict would change." : `${count} changes`;
    }
    catch (e) {
        result.className = "error";
        result.textContent = e instanceof Error ? e.message : String(e);
    }
}
for (const button of document.querySelectorAll("nav button")) {
    button.addEventListener("click", () => {
        for (const other of document.querySelectorAll("nav button")) {
            other.setAttribute("aria-pressed", String(other === button));
            $(other.dataset["view"]).hidden = other !== button;
        }
        redraw();
    });
}
$("query").addEventListener("submit", (e) => {
    e.preventDefault();
    void show();
});
$("stop").addEventListener("click", () => running?.abort());
$("try").addEventListener("submit", (e) => {
    e.preventDefault();
    void compare();
});
void show();
