// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"bytes"
	"encoding/json"
)

// kept are the fields that determine which pods a policy selects. A list in a field of present is reduced to one
// empty element, because only its presence matters.
var (
	kept = []string{
		"podSelector", "policyTypes", "endpointSelector", "nodeSelector", "subject", "tier", "priority", "enableDefaultDeny",
	}
	present = []string{"ingress", "egress", "ingressDeny", "egressDeny"}
)

// Reduced returns a JSON manifest of the same object that contains only the parts that are needed to isolate the pods
// that it selects; for a CIDR group, its labels. For a namespaced kind, the result has at most limit bytes: if the
// selectors are longer, it selects the whole namespace.
func Reduced(key Key, text []byte, limit int) []byte {
	known := Versions(key.Kind)
	out := map[string]any{"kind": key.Kind, "metadata": map[string]any{"name": key.Name}}
	if len(known) > 0 {
		out["apiVersion"] = known[0]
	}
	if key.Namespace != "" {
		out["metadata"] = map[string]any{"name": key.Name, "namespace": key.Namespace}
	}
	whole := make(map[string]any)
	read := json.NewDecoder(bytes.NewReader(text))
	read.UseNumber()
	if err := read.Decode(&whole); err != nil {
		clear(whole) // without selectors, the policy selects all pods that it can select
	}
	if version, ok := whole["apiVersion"].(string); ok && IsKind(version, key.Kind) {
		out["apiVersion"] = version
	}
	if spec, ok := whole["spec"].(map[string]any); key.Kind == groupKind {
		metadata, _ := whole["metadata"].(map[string]any)
		if labels := metadata["labels"]; labels != nil { // rules select the group by its labels
			out["metadata"] = map[string]any{"name": key.Name, "labels": labels}
		}
		out["spec"] = map[string]any{"externalCIDRs": []any{}}
	} else if ok {
		out["spec"] = reducedSpec(spec)
	}
	if specs, ok := whole["specs"].([]any); ok {
		var list []any
		for _, x := range specs {
			if spec, ok := x.(map[string]any); ok {
				list = append(list, reducedSpec(spec))
			}
		}
		out["specs"] = list
	}
	short, err := json.Marshal(out)
	if err != nil || Namespaced(key.Kind) && len(short) > limit {
		delete(out, "specs")
		out["spec"] = everything(key.Kind)
		short, _ = json.Marshal(out) // out contains only strings, which can always be encoded
	}
	return append(short, '\n')
}

// everything returns a spec that isolates a namespace in both directions. If the kind has deny rules, the isolation
// takes precedence over all allow rules.
func everything(kind string) map[string]any {
	some := []any{map[string]any{}}
	if kind == "NetworkPolicy" {
		return map[string]any{"podSelector": map[string]any{}, "policyTypes": []any{"Ingress", "Egress"}}
	}
	return map[string]any{"endpointSelector": map[string]any{}, "ingressDeny": some, "egressDeny": some}
}

func reducedSpec(spec map[string]any) map[string]any {
	out := make(map[string]any)
	for _, name := range kept {
		if v, ok := spec[name]; ok {
			out[name] = v
		}
	}
	for _, name := range present {
		if list, ok := spec[name].([]any); ok && len(list) > 0 {
			out[name] = []any{map[string]any{}}
		} else if v, ok := spec[name]; ok {
			out[name] = v
		}
	}
	return out
}
