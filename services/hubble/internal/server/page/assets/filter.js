// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors
// ends are flags about an end of a flow: with --from-X and --to-X for one end, and --X for any end.
const ends = {
    ip: "ip", pod: "pod", fqdn: "fqdn", label: "label", service: "service", port: "port", identity: "identity",
    workload: "workload", cluster: "cluster_name",
};
// fields are the other flags with a value.
const fields = {
    verdict: "verdict", protocol: "protocol", "drop-reason-desc": "drop_reason_desc", uuid: "uuid",
    "traffic-direction": "traffic_direction", "node-name": "node_name", "node-label": "node_labels",
    "dns-query": "dns_query", "http-status": "http_status_code", "http-method": "http_method",
    "http-path": "http_path", "http-url": "http_url", "trace-id": "trace_id",
};
const eventTypes = { drop: 1, "policy-verdict": 5, trace: 4, l7: 129, capture: 3 };
// split divides a command line into words. Quotes keep blanks.
export function split(line) {
    return [...line.matchAll(/"([^"]*)"|'([^']*)'|(\S+)/g)].map((m) => m[1] ?? m[2] ?? m[3] ?? "");
}
// moment is the time of --since or --until: "10m", "2h30m", or a time of RFC 3339.
function moment(text, now) {
    const parts = [...text.matchAll(/(\d+(?:\.\d+)?)(ms|s|m|h|d)/g)];
    if (parts.length > 0 && parts.map((p) => p[0]).join("") === text) {
        const unit = { ms: 1, s: 1e3, m: 6e4, h: 36e5, d: 864e5 };
        const age = parts.reduce((sum, p) => sum + Number(p[1]) * (unit[p[2]] ?? 0), 0);
        return new Date(now - age).toISOString();
    }
    const t = Date.parse(text);
    if (Number.isNaN(t)) {
        throw new Error(`${text}: not a time, such as 10m or 2026-11-30T10:00:00Z`);
    }
    return new Date(t).toISOString();
}
// value is a flag's value in the form of the API.
function value(flag, text) {
    switch (flag) {
        case "identity":
            return Number(text);
        case "workload": {
            const [namespace, name] = text.includes("/") ? text.split("/", 2) : ["", text];
            return { namespace, name };
        }
        case "verdict":
        case "drop-reason-desc":
        case "traffic-direction":
            return text.toUpperCase();
        case "service":
        case "pod":
            return text.includes("/") ? text : "default/" + text;
    }
    return text;
}
// Filters collects the flags of one list.
class Filters {
    flags = new Map();
    // add selects by fields; a further value of the same flag is another alternative.
    add(flag, names, v) {
        const choice = this.flags.get(flag) ?? names.map(() => ({}));
        names.forEach((name, i) => (choice[i][name] ??= []).push(v));
        this.flags.set(flag, choice);
    }
    // list returns every combination of the alternatives.
    list() {
        if (this.flags.size === 0) {
            return undefined;
        }
        let all = [{}];
        for (const choice of this.flags.values()) {
            all = all.flatMap((before) => choice.map((more) => join(before, more)));
        }
        return all;
    }
}
// join returns a filter with the fields of both.
function join(a, b) {
    for (const name of Object.keys(b)) {
        if (name in a) {
            throw new Error(`two flags select by ${name}; give only one of them`);
        }
    }
    return { ...a, ...b };
}
// parse returns the request for a command line of "hubble observe".
export function parse(line, now) {
    const r = {};
    const allow = new Filters(), deny = new Filters();
    let not = false;
    const words = split(line);
    if (words[0] === "hubble") {
        words.splice(0, words[1] === "observe" ? 2 : 1);
    }
    for (let i = 0; i < words.length; i++) {
        const word = words[i];
        const [name, inline] = word.includes("=") ? [word.slice(0, word.indexOf("=")), word.slice(word.indexOf("=") + 1)] : [word];
        if (!name.startsWith("-")) {
            throw new Error(`${word}: not a flag of hubble observe`);
        }
        let flag = name.replace(/^-+/, "");
        flag = { t: "type", n: "namespace", f: "follow", l: "label", "4": "ipv4", "6": "ipv6" }[flag] ?? flag;
        const to = not ? deny : allow;
        switch (flag) {
            case "follow":
                r.follow = true;
                continue;
            case "not":
                not = true;
                continue;
            case "ipv4":
            case "ipv6":
                to.add("ip-version", ["ip_version"], flag === "ipv4" ? "IPv4" : "IPv6");
                not = false;
                continue;
        }
        const text = inline ?? words[++i];
        if (text === undefined) {
            throw new Error(`${name} needs a value`);
        }
        const [, end, base] = /^(?:(from|to)-)?(.*)$/.exec(flag);
        const names = (field) => end === "from" ? ["source_" + field] : end === "to" ? ["destination_" + field] :
            ["source_" + field, "destination_" + field];
        if (flag === "since" || flag === "until") {
            r[flag] = moment(text, now);
        }
        else if (flag === "last" || flag === "first") {
            r.number = text;
            if (flag === "first") {
                r.first = true;
            }
        }
        else if (base === "namespace") {
            to.add(flag, names("pod"), text + "/");
        }
        else if (base in ends) {
            to.add(flag, names(ends[base]), value(base, text));
        }
        else if (flag === "type") {
            const type = eventTypes[text];
            if (type === undefined) {
                throw new Error(`--type ${text}: one of ${Object.keys(eventTypes).join(", ")}`);
            }
            to.add(flag, ["event_type"], { type });
        }
        else if (flag === "reply") {
            to.add(flag, ["reply"], text === "true");
        }
        else if (flag === "tcp-flags") {
            to.add(flag, ["tcp_flags"], Object.fromEntries(text.toUpperCase().split(",").map((f) => [f, true])));
        }
        else if (flag in fields) {
            to.add(flag, [fields[flag]], value(flag, text));
        }
        else {
            throw new Error(`${name}: not a flag of hubble observe that this page knows`);
        }
        not = false;
    }
    const whitelist = allow.list(), blacklist = deny.list();
    return { ...r, ...(whitelist && { whitelist }), ...(blacklist && { blacklist }) };
}
