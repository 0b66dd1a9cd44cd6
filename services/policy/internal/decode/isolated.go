// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package decode

import (
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// Isolated returns an object that isolates the pods that a text selects, because the text cannot be applied; why is
// the reason. The text is a stored policy that cannot be decoded, or a document of a file. If the pods cannot be
// determined, the object has no key.
func (r Options) Isolated(key policy.Key, text []byte, why error) policy.Object {
	docs, err := manifest.Parse(text)
	read := err == nil && len(docs) == 1
	if key.Kind == policy.KindDocument {
		if read {
			doc := docs[0].WithNamespace(key.Namespace)
			decode := policy.Decode
			if r.Held {
				decode = policy.DecodeHeld
			}
			if ob, err := decode(doc, r.Rules); err == nil {
				return policy.IsolateAs(key, ob, why)
			}
			return policy.IsolateNamespace(key, docs[0].Kind, why)
		}
		return policy.IsolateNamespace(key, "", why)
	}
	var form policy.Form
	if read {
		doc := docs[0]
		if policy.Namespaced(doc.Kind) {
			doc = doc.WithNamespace(key.Namespace)
		}
		form = doc
		// Isolate all pods that a policy of this kind can select.
	} else if known := policy.Versions(key.Kind); len(known) > 0 {
		form = policy.Written{Key: key, APIVersion: known[0], Text: text}
	} else {
		return policy.Object{}
	}
	ob, err := policy.Isolate(form, why)
	if err != nil || ob.Key != key {
		return policy.Object{}
	}
	return ob
}
