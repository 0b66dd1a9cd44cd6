// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"github.com/sluice-net/sluice/services/loadbalancer/internal/record"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// unsaved contains objects whose last change is in effect but could not be stored. So addresses of removed pods do
// not stay backends while the disk is full. The next change that is stored includes these objects.
type unsaved map[service.ObjectKey]struct{}

// add adds the objects of an edit that could not be stored.
func (u unsaved) add(e *edit) {
	for _, x := range e.puts {
		u[x.key()] = struct{}{}
	}
	for _, k := range e.gone {
		u[k] = struct{}{}
	}
}

// except returns the records of the objects that an edit does not change.
func (u unsaved) except(e *edit, ix *index) (c record.Change) {
	if len(u) == 0 {
		return c
	}
	named := make(map[service.ObjectKey]bool, len(e.puts)+len(e.gone))
	for _, x := range e.puts {
		named[x.key()] = true
	}
	for _, k := range e.gone {
		named[k] = true
	}
	c.Revision = ix.revision
	for _, k := range sorted(u, service.ObjectKey.Compare) {
		if named[k] {
			continue
		}
		if x := ix.object(k); x != nil {
			c.Puts = append(c.Puts, x.record())
		} else {
			c.Deletes = append(c.Deletes, record.Key(k))
		}
	}
	return c
}
