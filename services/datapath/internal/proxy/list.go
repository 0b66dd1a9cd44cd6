// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package proxy

import (
	"errors"
	"slices"

	"github.com/sluice-net/sluice/kit/work"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// List has a Proxy for each kind. Its methods may be called concurrently.
type List []*Proxy

// Tasks returns the background work.
func (l List) Tasks() (all []work.Task) {
	for _, p := range l {
		all = append(all, p.Tasks()...)
	}
	return all
}

// Awaits returns nil: without a proxy, redirected packets are dropped and everything else works.
func (List) Awaits() []work.Await { return nil }

// Warnings returns the warnings of each proxy.
func (l List) Warnings() (all []string) {
	for _, p := range l {
		all = append(all, p.Warnings()...)
	}
	return all
}

// Status returns the state of each proxy. It leaves out a proxy that receives TCP connections only until a process of it
// has connected, because a node may run none.
func (l List) Status() ([]Status, error) {
	all := make([]Status, 0, len(l))
	for _, p := range l {
		s, err := p.Status()
		if err != nil {
			return nil, err
		}
		if s.Kind == policytable.ProxyDNS || s.Attachments+s.Failed > 0 {
			all = append(all, s)
		}
	}
	return all, nil
}

// Check compares the devices and what the programs know with what they should be.
func (l List) Check() (all []endpoint.Difference, err error) {
	for _, p := range l {
		diffs, err := p.Check()
		if err != nil {
			return nil, err
		}
		all = slices.Concat(all, diffs)
	}
	return all, nil
}

// Repair repairs what Check finds.
func (l List) Repair() error {
	errs := make([]error, 0, len(l))
	for _, p := range l {
		errs = append(errs, p.Repair())
	}
	return errors.Join(errs...)
}
