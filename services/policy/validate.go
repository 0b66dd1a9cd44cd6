// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/excludedlabels"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// verdict is the result that `sluice-policy validate` prints for one document, as one line of JSON.
type verdict struct {
	// Problems start with the path of the field. A document without problems would be accepted.
	Problems []string `json:"problems"`
	// Dropped lists the fields that the kind does not have.
	Dropped []string `json:"droppedFields,omitempty"`
	Notes   []note   `json:"notes,omitempty"`
}

// note is a remark for the author of an accepted document.
type note struct {
	Kind  string `json:"kind"`
	Field string `json:"field,omitempty"`
	Text  string `json:"text"`
}

// validate checks the manifests on standard input in the same way as the service. It uses the settings in the flags,
// and defaults for all others. It needs no running service. `sluice policy validate` executes it, because only this
// program knows the kinds. The exit code is 0 if it printed verdicts, even negative ones, and 2 otherwise.
func validate(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("sluice-policy validate", flag.ContinueOnError)
	flags.SetOutput(stderr)
	namespace := flags.String("namespace", "", "namespace of documents that name none; empty: default")
	allowUnknown := flags.Bool("allow-unknown-fields", false,
		"report fields that a kind does not have, but accept the document")
	config := defaults(instance.Paths{})
	flags.BoolVar(&config.Cluster.NodeLabels, "cluster-node-labels", config.Cluster.NodeLabels,
		"the service has the setting cluster.nodeLabels")
	flags.BoolVar(&config.DNS.Proxy, "dns-proxy", config.DNS.Proxy, "the service has the setting dns.proxy")
	flags.BoolVar(&config.HTTP.Proxy, "http-proxy", config.HTTP.Proxy, "the service has the setting http.proxy")
	flags.BoolVar(&config.DNS.Implicit, "dns-implicit", config.DNS.Implicit,
		"the service has the setting dns.implicit")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	if flags.NArg() > 0 {
		fmt.Fprintf(stderr, "sluice-policy validate: %q is not a flag; manifests are read from standard input\n",
			flags.Arg(0))
		return 2
	}
	limit := int64(config.Limits.Manifests)
	data, err := io.ReadAll(io.LimitReader(stdin, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("larger than %d bytes (limits.manifests)", limit)
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluice-policy validate: standard input:", err)
		return 2
	}
	verdicts, err := check(data, decode.Options{
		Rules:        config.owner(nil, nil).Rules,
		Namespace:    *namespace,
		AllowUnknown: *allowUnknown,
		Large:        true,
	})
	if err != nil {
		fmt.Fprintln(stderr, "sluice-policy validate:", err)
		return 2
	}
	encoder := json.NewEncoder(stdout)
	encoder.SetEscapeHTML(false)
	for _, v := range verdicts {
		if err := encoder.Encode(v); err != nil {
			fmt.Fprintln(stderr, "sluice-policy validate:", err)
			return 2
		}
	}
	return 0
}

// check evaluates each document of a text.
func check(data []byte, as decode.Options) ([]verdict, error) {
	var all []verdict
	manifest.Each(data, func(manifest.Document) { all = append(all, verdict{Problems: []string{}}) })
	decoded, err := as.Decode(data)
	var bad *decode.Error
	switch {
	case errors.As(err, &bad) && bad.Whole == nil:
		for _, v := range bad.Violations {
			text := v.Text
			if v.Path != "" {
				text = v.Path + ": " + text
			}
			all[v.Document].Problems = append(all[v.Document].Problems, text)
		}
		decoded = bad.Others
	case err != nil:
		return nil, err
	}
	filter := excludedlabels.Default()
	var dns policy.DNSRules
	for _, d := range decoded {
		dns.Add(d.Object)
	}
	for _, d := range decoded {
		i := d.Document
		object, _ := filter.Apply(*d.Object)
		all[i].Dropped = append(all[i].Dropped, object.Unknown...)
		notes := dns.WithNotes(d.Object, object.Notes)
		for _, n := range notes {
			all[i].Notes = append(all[i].Notes, note{n.Kind.String(), n.Path, n.Text})
		}
		if n := notes.Omitted(); n > 0 {
			text := fmt.Sprintf("%d more notes are left out", n)
			all[i].Notes = append(all[i].Notes, note{Kind: "omitted", Text: text})
		}
	}
	return all, nil
}
