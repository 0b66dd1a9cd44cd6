// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import "errors"

// Refusal is the error for a state file that a service must neither use nor replace. All services use it, so that their
// messages have the same form: the fault, that the file is unchanged, and the possible next steps.
type Refusal struct {
	Path   string
	Kind   error // ErrCorrupt, ErrMissing, ErrForeign or ErrVersion
	Detail error
	// Commands lets the service start without the file. Loss completes the clause "if …, begin without it".
	Commands, Loss string
	Doc            string // documentation page about such a file; may be empty
}

func (r *Refusal) Error() string {
	text := "state file " + r.Path + " is " + r.Kind.Error() + ": " + r.Detail.Error() + "; "
	if !errors.Is(r.Kind, ErrMissing) {
		text += "the file was not changed: "
	}
	if errors.Is(r.Kind, ErrVersion) {
		text += "either start the version that wrote it"
	} else {
		text += "either restore a copy of it"
	}
	text += ", or, if " + r.Loss + ", begin without it: " + r.Commands
	if r.Doc != "" {
		text += " (" + r.Doc + ")"
	}
	return text
}

// Unwrap returns the kind and the detail.
func (r *Refusal) Unwrap() []error { return []error{r.Kind, r.Detail} }

// SetAside returns the command that renames a file that is refused.
func SetAside(path string) string { return "mv " + path + " " + path + ".refused" }
