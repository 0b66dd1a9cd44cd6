// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors
// The service map: who opens connections to whom.
import { Graph, layout } from "./dagre.js";
import { nameOf } from "./flow.js";
// mostNodes is the number of nodes that a map can show; the names with the fewest flows become one node.
const mostNodes = 60;
const others = "others";
// serviceOf is the name of an end in the map: its namespace with its app, or what is outside.
export function serviceOf(e, address) {
    const app = e?.labels?.map((l) => /^(?:k8s|any):(?:app|app\.kubernetes\.io\/name|k8s-app)=(.+)$/.exec(l)?.[1]).find((v) => v);
    if (e?.namespace && app) {
        return e.namespace + "/" + app;
    }
    return nameOf(e, address);
}
// edges counts the connections between services. Replies count in the direction of the connection.
export function edges(flows) {
    const all = new Map(), weight = new Map();
    const ends = [...flows].map((f) => {
        const from = serviceOf(f.source, f.IP?.source), to = serviceOf(f.destination, f.IP?.destination);
        const [a, b] = f.is_reply === true ? [to, from] : [from, to];
        [a, b].forEach((n) => weight.set(n, (weight.get(n) ?? 0) + 1));
        return { a, b, denied: f.verdict === "DROPPED" };
    });
    const kept = new Set([...weight].sort((x, y) => y[1] - x[1]).slice(0, mostNodes).map(([name]) => name));
    for (const e of ends) {
        const from = kept.has(e.a) ? e.a : others, to = kept.has(e.b) ? e.b : others;
        const key = JSON.stringify([from, to]);
        const edge = all.get(key) ?? { from, to, allowed: 0, denied: 0 };
        edge[e.denied ? "denied" : "allowed"]++;
        all.set(key, edge);
    }
    return [...all.values()];
}
const svgNS = "http://www.w3.org/2000/svg";
function element(name, attributes, ...children) {
    const e = document.createElementNS(svgNS, name);
    for (const [k, v] of Object.entries(attributes)) {
        e.setAttribute(k, String(v));
    }
    e.append(...children);
    return e;
}
// draw returns the map as a picture. choose is called with the name of the node that the user clicks.
export function draw(list) {
    const g = new Graph();
    g.setGraph({ rankdir: "LR", nodesep: 16, ranksep: 90, marginx: 8, marginy: 8 });
    g.setDefaultEdgeLabel(() => ({}));
    for (const e of list) {
        for (const name of [e.from, e.to]) {
            g.setNode(name, { width: 24 + 7 * name.length, height: 28 });
        }
        g.setEdge(e.from, e.to, {});
    }
    layout(g);
    const size = g.graph();
    const svg = element("svg", { viewBox: `0 0 ${size.width ?? 1} ${size.height ?? 1}`, width: size.width ?? 1, role: "img" });
    svg.append(element("defs", {}, element("marker", {
        id: "arrow", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto-start-reverse",
    }, element("path", { d: "M0,0 L8,4 L0,8 z" }))));
    for (const e of list) {
        const points = g.edge(e.from, e.to).points ?? [];
        svg.append(element("path", {
            d: "M" + points.map((p) => `${p.x},${p.y}`).join(" L"), class: e.denied > 0 ? "denied" : "allowed",
            "marker-end": "url(#arrow)", "data-from": e.from, "data-to": e.to,
        }, element("title", {}, `${e.from} to ${e.to}: ${e.allowed} allowed, ${e.denied} denied`)));
    }
    for (const name of g.nodes()) {
        const n = g.node(name);
        svg.append(element("g", { "data-node": name }, element("rect", { x: n.x - n.width / 2, y: n.y - n.height / 2, width: n.width, height: n.height, rx: 4 }), element("text", { x: n.x, y: n.y + 4, "text-anchor": "middle" }, name)));
    }
    return svg;
}
