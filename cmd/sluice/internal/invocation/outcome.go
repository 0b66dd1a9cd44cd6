// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"fmt"
	"io"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
)

// Outcome reports whether the kernel enforces a change.
type Outcome struct {
	Revision     uint64 // after the change
	ValidateOnly bool   // the change was only checked
	Waited       bool   // the command waited for the kernel
	Pending      string // why the kernel does not enforce it; empty: it does, or Waited is false
	Took         time.Duration
	Node         LocalNode // the node that was changed
}

// Facts returns the outcome as JSON keys.
func (o Outcome) Facts() []message.Fact {
	enforced := any(nil)
	if o.Waited {
		enforced = o.Pending == ""
	}
	return []message.Fact{
		{Key: "validateOnly", Value: o.ValidateOnly}, {Key: "enforced", Value: enforced}, {Key: "pending", Value: o.Pending},
	}
}

// Write writes the outcome as one line. component is the service that made the change, with its article: "the load
// balancer".
func (o Outcome) Write(w io.Writer, component string) {
	o.write(w, component)
	o.Node.WriteOnly(w)
}

func (o Outcome) write(w io.Writer, component string) {
	switch {
	case o.ValidateOnly:
		fmt.Fprintln(w, "Nothing was changed: --dry-run.")
	case !o.Waited:
		fmt.Fprintf(w, "Revision %d is stored in %s; the command did not wait until the kernel enforced it.\n",
			o.Revision, component)
	case o.Pending == "":
		fmt.Fprintf(w, "The kernel enforces revision %d, after %s.\n", o.Revision, o.Took)
	default:
		fmt.Fprintln(w, output.Printable(fmt.Sprintf("Revision %d is stored, but the kernel does not enforce it: %s.",
			o.Revision, o.Pending)))
	}
}

// Err returns ErrNotReady if the kernel does not enforce the change.
func (o Outcome) Err() error {
	if o.Pending != "" {
		return ErrNotReady
	}
	return nil
}
