// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Subjects of differences.
const (
	SubjectEndpoint = "policy-word"   // the tables of an endpoint; the key is its ID
	SubjectIdentity = "identity-word" // the entry of an identity
)

// Difference is a deviation of the kernel from what this process wrote.
type Difference struct {
	Subject string
	Key     string
	Want    string
	Have    string
}

// Check compares the entries of endpoints and of identities with what was written, and with repair
// writes them again.
func (a *Applier) Check(repair bool) ([]Difference, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	endpoints, err := a.cfg.Kernel.Bindings()
	if err != nil {
		return nil, fmt.Errorf("list endpoints: %w", err)
	}
	var diffs []Difference
	var errs []error
	for _, have := range endpoints {
		want := a.endpoints.slots[have.Slot]
		if want == nil || have.Egress == want.Egress && have.Ingress == want.Ingress {
			continue
		}
		diffs = append(diffs, Difference{SubjectEndpoint, fmt.Sprint(have.Slot), want.Binding.String(), have.String()})
		if repair {
			errs = append(errs, a.setPolicy(want, &subject{egress: want.Egress, ingress: want.Ingress}))
		}
	}
	entries, err := a.cfg.Kernel.Identities()
	if err != nil {
		return diffs, fmt.Errorf("list identities: %w", err)
	}
	changes := a.identities.differing(entries)
	for _, id := range slices.Sorted(maps.Keys(changes)) {
		diffs = append(diffs, Difference{SubjectIdentity, fmt.Sprint(id), fmt.Sprintf("%+v", changes[id]), fmt.Sprintf("%+v", entries[id])})
	}
	if repair && len(changes) > 0 {
		errs = append(errs, a.cfg.Kernel.SetIdentities(changes))
	}
	if repair && len(diffs) > 0 {
		// Evaluate connections again: wrong entries may have allowed some.
		errs = append(errs, a.cfg.Kernel.BumpEpochs())
	}
	return diffs, errors.Join(errs...)
}
