// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"google.golang.org/protobuf/types/known/timestamppb"

	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// show prints v as JSON, or what table writes.
func (c *command) show(v any, table func(w io.Writer)) error {
	if c.format == "json" {
		e := json.NewEncoder(c.out)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(v)
	}
	w := tabwriter.NewWriter(c.out, 0, 4, 2, ' ', 0)
	table(w)
	return w.Flush()
}

// row writes one line of a table.
func row(w io.Writer, cells ...any) {
	texts := make([]string, len(cells))
	for i, cell := range cells {
		text := printable(fmt.Sprint(cell))
		if text == "" {
			text = "-"
		}
		texts[i] = text
	}
	fmt.Fprintln(w, strings.Join(texts, "\t"))
}

// printable keeps text from a container, such as a label's value, from talking
// to the terminal.
func printable(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	q := fmt.Sprintf("%q", s)
	return q[1 : len(q)-1]
}

// owner is who an endpoint or an allocation belongs to.
type owner struct {
	ContainerID string `json:"containerId"`
	Interface   string `json:"interfaceName"`
}

func ownerOf(o *workloadv1.Owner) owner {
	return owner{ContainerID: o.GetContainerId(), Interface: o.GetInterfaceName()}
}

// String shortens a container id as runtimes do.
func (o owner) String() string {
	id := o.ContainerID
	if len(id) == 64 && strings.Trim(id, "0123456789abcdef") == "" {
		id = id[:13]
	}
	return id + "/" + o.Interface
}

func labelTexts(labels []*workloadv1.Label) []string {
	texts := make([]string, 0, len(labels))
	for _, l := range labels {
		text := l.GetSource() + ":" + l.GetKey()
		if l.GetValue() != "" {
			text += "=" + l.GetValue()
		}
		texts = append(texts, text)
	}
	slices.Sort(texts)
	return texts
}

func addressTexts(addresses [][]byte) []string {
	texts := make([]string, 0, len(addresses))
	for _, b := range addresses {
		texts = append(texts, addressText(b))
	}
	return texts
}

func addressText(b []byte) string {
	if a, ok := netip.AddrFromSlice(b); ok {
		return a.String()
	}
	return ""
}

func macText(b []byte) string { return net.HardwareAddr(b).String() }

// enum is the last word of an enum's name, in lower case: READY of
// ENDPOINT_STATE_READY is "ready".
func enum(name fmt.Stringer, prefix string) string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name.String(), prefix), "_", "-"))
}

// when is nil for an unset time, which JSON then leaves out.
func when(t *timestamppb.Timestamp) *time.Time {
	if t == nil {
		return nil
	}
	at := t.AsTime()
	return &at
}

// since is how long ago t was, for people.
func since(t *time.Time) string {
	if t == nil {
		return ""
	}
	d := time.Since(*t)
	switch {
	case d < time.Minute:
		return d.Round(time.Second).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 48*time.Hour:
		return d.Round(time.Minute).String()
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// ordered ranges over a map by its keys.
func ordered[K cmp.Ordered, V any](m map[K]V) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}
