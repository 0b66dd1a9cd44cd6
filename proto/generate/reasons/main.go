// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command reasons is a protoc plugin. From the enum sluice.datapath.v1.Reason it generates the enum
// of the eBPF programs, the names in Go, and a page of the documentation. buf.gen.reasons.yaml runs
// it.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/format"
	"slices"
	"strings"

	"google.golang.org/protobuf/compiler/protogen"
)

// Generated files, relative to the root of the repository.
const (
	header = "bpf/include/sluice/reason.h"
	names  = "services/datapath/internal/observation/event/reasons.go"
	page   = "docs/reference/reasons.md"
)

// Ranges of the numbers, as documented at the enum.
const (
	firstDrop  = 16
	firstQuiet = 48
	firstLate  = 52 // first number of the second range of drops with events
)

// severities are the permitted severities of a drop reason.
var severities = []string{"expected", "configuration", "capacity", "attack", "fault"}

// reason is one value of the enum.
type reason struct {
	number         int
	name           string // "POLICY_DENIED"
	what           string // what happened, in full sentences
	severity, next string // set for a drop that sends events
}

func main() {
	protogen.Options{}.Run(func(p *protogen.Plugin) error {
		for _, f := range p.Files {
			for _, e := range f.Enums {
				if e.Desc.FullName() != "sluice.datapath.v1.Reason" {
					continue
				}
				all, err := read(e)
				if err != nil {
					return err
				}
				return write(p, all)
			}
		}
		return errors.New("there is no enum sluice.datapath.v1.Reason")
	})
}

// read returns the values of the enum except the first.
func read(e *protogen.Enum) ([]reason, error) {
	var all []reason
	for _, v := range e.Values[1:] {
		r := reason{
			number: int(v.Desc.Number()),
			name:   strings.TrimPrefix(string(v.Desc.Name()), "REASON_"),
		}
		text := strings.ReplaceAll(strings.TrimSpace(string(v.Comments.Leading)), "\n ", "\n")
		what, more, has := strings.Cut(text, "\n\n")
		r.what = strings.ReplaceAll(what, "\n", " ")
		if has != (r.number >= firstDrop && !r.quiet()) {
			return nil, fmt.Errorf("%s: exactly the drops with events have a severity", v.Desc.Name())
		}
		if has {
			severity, next, ok := strings.Cut(strings.ReplaceAll(more, "\n", " "), ". ")
			r.severity, r.next = strings.TrimPrefix(severity, "Severity: "), next
			if !ok || !slices.Contains(severities, r.severity) {
				return nil, fmt.Errorf("%s: the second paragraph is not %q with one of %v, and what an operator does next",
					v.Desc.Name(), "Severity: S. Next.", severities)
			}
		}
		all = append(all, r)
	}
	return all, nil
}

func (r *reason) quiet() bool { return r.number >= firstQuiet && r.number < firstLate }

// label returns the name in metrics and events.
func (r *reason) label() string { return strings.ReplaceAll(strings.ToLower(r.name), "_", "-") }

// initialisms are words that Go names write in capitals.
var initialisms = []string{"arp", "ndp", "ip", "mac", "nat", "sctp"}

// ident returns the name of the Go constant.
func (r *reason) ident() string {
	var b strings.Builder
	for word := range strings.SplitSeq(strings.ToLower(r.name), "_") {
		if slices.Contains(initialisms, word) {
			b.WriteString(strings.ToUpper(word))
		} else {
			b.WriteString(strings.ToUpper(word[:1]) + word[1:])
		}
	}
	return b.String()
}

func write(p *protogen.Plugin, all []reason) error {
	code, err := format.Source(inGo(all))
	if err != nil {
		return fmt.Errorf("%s: %w", names, err)
	}
	for name, content := range map[string][]byte{header: inC(all), names: code, page: inDocs(all)} {
		g := p.NewGeneratedFile(name, "")
		if _, err := g.Write(content); err != nil {
			return err
		}
	}
	return nil
}

func inC(all []reason) []byte {
	var b bytes.Buffer
	b.WriteString(`/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
/* Code generated from sluice.datapath.v1.Reason by "make generate". DO NOT EDIT. */
#ifndef SLUICE_REASON_H
#define SLUICE_REASON_H

/*
 * Why a packet was forwarded or dropped. Numbers are never reused: a newer process reads them
 * from the counters of an older program.
 */
enum sl_reason {
	SL_CONTINUE = 0, /* undecided: continue with the next step */
	SL_ASK_SERVICE = 15, /* only within a program: no tracked connection */

`)
	for _, r := range all {
		fmt.Fprintf(&b, "\tSL_REASON_%s = %d,\n", r.name, r.number)
	}
	fmt.Fprintf(&b, `
	SL_FIRST_DROP = %d,
	SL_FIRST_QUIET = %d, /* first drop without events */
	SL_FIRST_LATE = %d, /* first drop with events after that range */
	SL_REASONS = %d, /* first unused number */
};

#endif
`, firstDrop, firstQuiet, firstLate, all[len(all)-1].number+1)
	return b.Bytes()
}

func inGo(all []reason) []byte {
	var b bytes.Buffer
	b.WriteString(`// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Code generated from sluice.datapath.v1.Reason by "make generate". DO NOT EDIT.

package event

// Reasons of packets.
const (
`)
	for _, r := range all {
		fmt.Fprintf(&b, "\t// %s: %s\n\t%s Reason = %d\n", r.ident(), r.what, r.ident(), r.number)
	}
	fmt.Fprintf(&b, `)

const (
	firstDrop Reason = %d
	firstQuiet Reason = %d
	firstLate Reason = %d
)

// reasonNames are part of the interface: they are metric labels.
var reasonNames = map[Reason]string{
`, firstDrop, firstQuiet, firstLate)
	for _, r := range all {
		fmt.Fprintf(&b, "\t%s: %q,\n", r.ident(), r.label())
	}
	b.WriteString("}\n")
	return b.Bytes()
}

func inDocs(all []reason) []byte {
	var b bytes.Buffer
	b.WriteString(`# Reasons

This page is generated from the enum ` + "`Reason`" + ` of proto/sluice/datapath/v1/datapath.proto. Each packet is
counted once, by its reason and direction: ` + "`sluice_datapath_packets_total`" + `.
[datapath.md](../datapath.md#reasons) says which packets also send an event, and at which rate.

## Dropped

Severity: *expected* follows from a policy or from the state of the cluster; *configuration* needs a
change of a setting or of a route; at *capacity* a limit is reached; *attack* says that the sender
forges something, or is broken; a *fault* is one of Sluice or of the kernel.

| number | name | what happened | severity | next step |
|---|---|---|---|---|
`)
	for _, r := range all {
		if r.severity != "" {
			fmt.Fprintf(&b, "| %d | `%s` | %s | %s | %s |\n", r.number, r.label(), r.what, r.severity, r.next)
		}
	}
	b.WriteString(`
## Dropped without an event

Every pod causes such packets.

| number | name | what happened |
|---|---|---|
`)
	for _, r := range all {
		if r.quiet() {
			fmt.Fprintf(&b, "| %d | `%s` | %s |\n", r.number, r.label(), r.what)
		}
	}
	b.WriteString(`
## Forwarded or answered

| number | name | what happened |
|---|---|---|
`)
	for _, r := range all {
		if r.number < firstDrop {
			fmt.Fprintf(&b, "| %d | `%s` | %s |\n", r.number, r.label(), r.what)
		}
	}
	return b.Bytes()
}
