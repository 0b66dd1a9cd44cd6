// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// The parts of Hubble's flow that the page shows.

export interface End { namespace?: string; pod_name?: string; identity?: number; labels?: string[]; }
export interface Policy { kind?: string; namespace?: string; name?: string; revision?: string; }
export interface Flow {
  uuid?: string; time?: string; node_name?: string; verdict?: string; drop_reason_desc?: string; is_reply?: boolean;
  traffic_direction?: string; Type?: string;
  IP?: { source?: string; destination?: string };
  l4?: Record<string, { source_port?: number; destination_port?: number; type?: number; code?: number }>;
  l7?: { dns?: { query?: string; rcode?: number; ips?: string[] } };
  source?: End; destination?: End;
  egress_allowed_by?: Policy[]; ingress_allowed_by?: Policy[]; egress_denied_by?: Policy[]; ingress_denied_by?: Policy[];
  extensions?: { value?: Record<string, unknown> };
}

// nameOf is the pod of an end; without one, its reserved identity, or its address.
export function nameOf(e: End | undefined, address: string | undefined): string {
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
export function portsOf(f: Flow): { protocol: string; from: string; to: string } {
  const [protocol, l4] = Object.entries(f.l4 ?? {})[0] ?? ["", {}];
  const port = (n: number | undefined): string => (n ? ":" + n : "");
  return { protocol, from: port(l4.source_port), to: port(l4.destination_port) };
}

// reasonOf returns the reason with Sluice's name, or what a DNS message asks for.
export function reasonOf(f: Flow): string {
  const reason = f.extensions?.value?.["reason"];
  return (typeof reason === "string" && reason) || f.l7?.dns?.query || f.drop_reason_desc || "";
}
