// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"strings"
	"testing"
)

func TestTextThatCannotBeReadIsolatesTheNamespace(t *testing.T) {
	for kind, subject := range map[string]string{
		"NetworkPolicy": "a", "CiliumNetworkPolicy": "a", "CiliumClusterwideNetworkPolicy": "",
		"ClusterNetworkPolicy": "", "AdminNetworkPolicy": "", "BaselineAdminNetworkPolicy": "",
	} {
		for what, text := range map[string]string{
			"no YAML": "\x01", "nothing": "", "two documents": "a: b\n---\na: b\n",
			"too many values": "a: [" + strings.Repeat("1,", 200_000) + "1]",
		} {
			key := Key{Kind: kind, Namespace: subject, Name: "p"}
			w := Written{Key: key, APIVersion: Versions(kind)[0], Text: []byte(text)}
			o, err := DecodeHeld(w, options)
			if err != nil || o.Key != w.Key || o.Isolates == "" || len(o.Specs) == 0 {
				t.Errorf("%s, %s: %+v, %v", kind, what, o, err)
				continue
			}
			s := o.Specs[0]
			here, there := s.Subject.Matches(pod("app", "web", "a")), s.Subject.Matches(pod("app", "web", "b"))
			if !here || there != (subject == "") {
				t.Errorf("%s, %s: selects %v", kind, what, s.Subject)
			}
			if !s.Selects[0] || !s.Selects[1] || len(s.Rules) != 2 {
				t.Errorf("%s, %s: %+v is not isolated in both directions", kind, what, s)
			}
		}
	}
	group := Written{Key: Key{Kind: "CiliumCIDRGroup", Name: "g"}, APIVersion: "cilium.io/v2", Text: []byte("\x01")}
	o, err := DecodeHeld(group, options)
	if err != nil || o.Key != group.Key || o.Group == nil || !o.Group.Closed || o.Isolates == "" {
		t.Errorf("an unreadable group is %+v, %v; want a closed group", o, err)
	}
}
