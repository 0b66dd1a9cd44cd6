// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"fmt"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
)

// Written is an object as the text of its manifest. To save memory, the text is parsed only when the object is
// decoded.
type Written struct {
	Key        Key
	APIVersion string
	Text       []byte // JSON or YAML
	// Created and UID are taken from the object. They order the objects of a tenant.
	Created time.Time
	UID     string
	// Record is nil unless the source is configured to add records.
	Record *Record
}

// Record contains data of an object in the API server that is not in its manifest.
type Record struct {
	UID             string
	Generation      int64 // generation of the spec
	ResourceVersion string
	Conditions      []byte // status.conditions, in JSON; empty: the object has none
}

// Type implements Form.
func (w Written) Type() (apiVersion, kind string) { return w.APIVersion, w.Key.Kind }

// Decode implements Form. If the text cannot be parsed at all, it decodes only the name, so that the pods which the
// object may select can be isolated.
func (w Written) Decode(into any) (unknown []string, err error) {
	docs, err := manifest.Parse(w.Text)
	if err == nil && len(docs) == 1 {
		return docs[0].Decode(into)
	}
	if err == nil {
		err = fmt.Errorf("the text has %d documents", len(docs))
	}
	named, nerr := manifest.Parse(fmt.Appendf(nil, "metadata: {name: %q, namespace: %q}", w.Key.Name, w.Key.Namespace))
	if nerr != nil {
		return nil, nerr
	}
	if _, nerr = named[0].Decode(into); nerr != nil {
		return nil, nerr
	}
	return nil, manifest.Problems{{Text: err.Error(), Stops: true}}
}
