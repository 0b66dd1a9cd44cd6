// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors
// nameOf is the pod of an end; without one, its reserved identity, or its address.
export function nameOf(e, address) {
    if (e?.pod_name) {
        return e.namespace + "/" + e.pod_name;
    }
    const reserved = e?.labels?.map((l) => /^reserved:(.+)$/.exec(l)?.[1]).find((v) => v && v !== "world" && !v.startsWith("world-"));
    if (reserved) {
        return reserved;
    }
    return address || (e?.namespace ? e.namespace + "/?" : "unknown");
}
// portsOf returns the protocol and the ports.
export function portsOf(f) {
    const [protocol, l4] = Object.entries(f.l4 ?? {})[0] ?? ["", {}];
    const port = (n) => (n ? ":" + n : "");
    return { protocol, from: port(l4.source_port), to: port(l4.destination_port) };
}
// reasonOf returns the reason with Sluice's name, or what a DNS message asks for.
export function reasonOf(f) {
    const reason = f.extensions?.value?.["reason"];
    return (typeof reason === "string" && reason) || f.l7?.dns?.query || f.drop_reason_desc || "";
}
