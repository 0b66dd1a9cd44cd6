// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"strings"
	"testing"
)

// What an API server holds and nothing here can read isolates all that it may select.
func TestTextThatCannotBeReadIsolatesTheNamespace(t *testing.T) {
	for kind, subject := range map[string]string{"NetworkPolicy": "a", "CiliumNetworkPolicy": "a", "CiliumClusterwideNetworkPolicy": "", "ClusterNetworkPolicy": "", "AdminNetworkPolicy": "", "BaselineAdminNetworkPolicy": ""} {
		for what, text := range map[string]string{
			"no YAML": "\x01", "nothing": "", "two documents": "a: b\n---\na: b\n", "too many values": "a: [" + strings.Repeat("1,", 200_000) + "1]",
		} {
			w := Written{Key: Key{Kind: kind, Namespace: subject, Name: "p"}, APIVersion: Versions(kind)[0], Text: []byte(text)}
			o, err := DecodeHeld(w, options)
			if err != nil || o.Key != w.Key || o.Isolates == "" || len(o.Specs) == 0 {
				t.Errorf("%s, %s: %+v, %v", kind, what, o, err)
				continue
			}
			s := o.Specs[0]
			if !s.Subject.Matches(pod("app", "web", "a")) || s.Subject.Matches(pod("app", "web", "b")) != (subject == "") {
				t.Errorf("%s, %s: selects %v", kind, what, s.Subject)
			}
			if !s.Selects[0] || !s.Selects[1] || len(s.Rules) != 2 {
				t.Errorf("%s, %s: %+v is not isolated in both directions", kind, what, s)
			}
		}
	}
	if _, err := DecodeHeld(Written{Key: Key{Kind: "CiliumCIDRGroup", Name: "g"}, APIVersion: "cilium.io/v2", Text: []byte("\x01")}, options); err == nil {
		t.Error("a group that cannot be read is taken")
	}
}
