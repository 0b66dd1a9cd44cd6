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

// Outcome says whether the kernel enforces a change that a component has made.
type Outcome struct {
	Revision     uint64 // of the component
	ValidateOnly bool   // nothing was changed
	Waited       bool   // for the kernel
	Pending      string // why the kernel does not enforce it; "": it does, or was not waited for
	Took         time.Duration
}

// Facts are the outcome in JSON.
func (o Outcome) Facts() []message.Fact {
	enforced := any(nil)
	if o.Waited {
		enforced = o.Pending == ""
	}
	return []message.Fact{
		{Key: "validateOnly", Value: o.ValidateOnly}, {Key: "enforced", Value: enforced}, {Key: "pending", Value: o.Pending},
	}
}

// Write writes the outcome as a line for people. component is what made the change, with its
// article.
func (o Outcome) Write(w io.Writer, component string) {
	switch {
	case o.ValidateOnly:
		fmt.Fprintln(w, "Nothing was changed: --validate-only.")
	case !o.Waited:
		fmt.Fprintf(w, "Revision %d is in force in %s; that of the kernel was not waited for.\n", o.Revision, component)
	case o.Pending == "":
		fmt.Fprintf(w, "The kernel enforces revision %d, after %s.\n", o.Revision, o.Took)
	default:
		fmt.Fprintln(w, output.Printable(fmt.Sprintf("Revision %d is stored, but the kernel does not enforce it: %s.",
			o.Revision, o.Pending)))
	}
}

// Err is ErrNotReady if the kernel does not enforce the change.
func (o Outcome) Err() error {
	if o.Pending != "" {
		return ErrNotReady
	}
	return nil
}
