// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package mask reduces flows to the fields that a client requests.
package mask

import (
	"errors"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// Mask is the tree of the requested fields; nil requests all.
type Mask map[protoreflect.Name]Mask

// New returns the mask of a request; nil without paths.
func New(fm *fieldmaskpb.FieldMask) (Mask, error) {
	if len(fm.GetPaths()) == 0 {
		return nil, nil
	}
	if !fm.IsValid(&flow.Flow{}) {
		return nil, errors.New("names a field that a flow does not have")
	}
	fm.Normalize()
	m := make(Mask)
	for _, path := range fm.GetPaths() {
		at := m
		for name := range strings.SplitSeq(path, ".") {
			next := at[protoreflect.Name(name)]
			if next == nil {
				next = make(Mask)
				at[protoreflect.Name(name)] = next
			}
			at = next
		}
	}
	return m, nil
}

// Apply returns a flow with the requested fields of f. It may share parts with f.
func (m Mask) Apply(f *flow.Flow) *flow.Flow {
	if m == nil {
		return f
	}
	out := &flow.Flow{}
	m.copy(out.ProtoReflect(), f.ProtoReflect())
	return out
}

func (m Mask) copy(to, from protoreflect.Message) {
	from.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		next, ok := m[fd.Name()]
		switch {
		case !ok:
		case len(next) == 0:
			to.Set(fd, v)
		default:
			next.copy(to.Mutable(fd).Message(), v.Message())
		}
		return true
	})
}
