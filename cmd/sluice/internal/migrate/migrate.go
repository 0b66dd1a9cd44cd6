// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package migrate compares the configuration and the objects of another network with Sluice.
package migrate

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policy"
)

// Command is `migrate`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("migrate", "Compare another network with Sluice before you move to it", fromCilium(inv))
}

func fromCilium(inv *invocation.Invocation) *cobra.Command {
	var files []string
	cmd := &cobra.Command{
		Use:   "from-cilium -f FILE",
		Short: "Report which settings and objects of Cilium work, differ or are missing, and the values to install with",
		Long: `Read files with the ConfigMap cilium-config, Helm values of Cilium, policies and other
objects; no cluster is needed. Report which settings and objects work unchanged, which
differ and which are unsupported, and print values for Sluice's Helm chart. Policies are
checked as by policy validate, which executes sluice-policy. The exit code is 1 if something
is unsupported.`,
		Example: `  kubectl -n kube-system get configmap cilium-config -o yaml >config.yaml
  kubectl get cnp,ccnp,ccg,netpol,svc -A -o yaml >objects.yaml
  helm -n kube-system get values cilium -o yaml >values.yaml
  sluice migrate from-cilium -f config.yaml -f objects.yaml -f values.yaml`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(files) == 0 {
				return invocation.Usagef("nothing to compare: name files with -f FILE, or -f - for standard input")
			}
			r := newReport()
			for _, file := range files {
				if err := r.read(file, cmd.InOrStdin()); err != nil {
					return err
				}
			}
			if len(r.policies) > 0 {
				results, err := policy.CheckOffline(cmd.Context(), r.policyStream(), []string{"--cluster-node-labels"})
				if err != nil {
					return err
				}
				if err := r.addPolicies(results); err != nil {
					return err
				}
			}
			r.finish()
			if err := inv.Show(r, r.write); err != nil {
				return err
			}
			if len(r.Missing) > 0 {
				return invocation.ErrReported
			}
			return nil
		},
	}
	cmd.Flags().StringArrayVarP(&files, "filename", "f", nil, "file, or - for standard input; may be repeated")
	return cmd
}

// finding is one line of the report.
type finding struct {
	From  string `json:"from"` // the setting or the object
	Value string `json:"value,omitempty"`
	Text  string `json:"text"`
}

// report is the output of `migrate from-cilium -o json`.
type report struct {
	Works   []finding `json:"works"`
	Differs []finding `json:"differs"`
	Missing []finding `json:"missing"`
	// NotCompared are settings that Sluice's table does not contain.
	NotCompared []string       `json:"notCompared"`
	Values      map[string]any `json:"values"`

	policies []object
	// kept is how long addresses of names must stay after their TTL; 0: the default is enough.
	kept time.Duration
}

// object is a decoded document.
type object = map[string]any

func newReport() *report {
	return &report{
		Works: []finding{}, Differs: []finding{}, Missing: []finding{}, NotCompared: []string{}, Values: map[string]any{},
	}
}

// read adds the documents of a file.
func (r *report) read(file string, stdin io.Reader) error {
	input := stdin
	if file != "-" {
		f, err := os.Open(file) //nolint:gosec // of the caller
		if err != nil {
			return err
		}
		defer f.Close() //nolint:errcheck // only read
		input = f
	}
	decoder := yaml.NewDecoder(input)
	for i := 1; ; i++ {
		var document object
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: document %d: %w", file, i, err)
		}
		if document != nil {
			r.add(document)
		}
	}
}

// add adds an object, the items of a list, or Helm values.
func (r *report) add(o object) {
	kind, _ := o["kind"].(string)
	version, _ := o["apiVersion"].(string)
	group, _, _ := strings.Cut(version, "/")
	if items, ok := o["items"].([]any); ok && strings.HasSuffix(kind, "List") {
		for _, item := range items {
			if of, ok := item.(object); ok {
				r.add(of)
			}
		}
		return
	}
	switch {
	case kind == "" && version == "":
		r.addValues(o)
	case kind == "ConfigMap" && version == "v1":
		if nameOf(o) == "ConfigMap kube-system/cilium-config" || strings.HasSuffix(nameOf(o), "/cilium-config") {
			data, _ := o["data"].(object)
			r.addConfig(data)
		}
	case policyKinds[kind] != "" && policyKinds[kind] == group:
		r.policies = append(r.policies, o)
	case group == "cilium.io":
		r.addForeign(kind, o)
	}
	r.addAnnotations(o)
}

// policyKinds are the kinds that sluice-policy checks, with their groups.
var policyKinds = map[string]string{
	"NetworkPolicy": "networking.k8s.io", "CiliumNetworkPolicy": "cilium.io",
	"CiliumClusterwideNetworkPolicy": "cilium.io", "CiliumCIDRGroup": "cilium.io",
	"ClusterNetworkPolicy": "policy.networking.k8s.io", "AdminNetworkPolicy": "policy.networking.k8s.io",
	"BaselineAdminNetworkPolicy": "policy.networking.k8s.io",
}

// nameOf returns the kind, the namespace and the name of an object.
func nameOf(o object) string {
	metadata, _ := o["metadata"].(object)
	name := fmt.Sprint(metadata["name"])
	if namespace, ok := metadata["namespace"].(string); ok {
		name = namespace + "/" + name
	}
	return fmt.Sprintf("%s %s", o["kind"], name)
}

// policyStream returns the policies as documents.
func (r *report) policyStream() []byte {
	var b bytes.Buffer
	for _, o := range r.policies {
		b.WriteString("---\n")
		content, err := yaml.Marshal(o)
		if err != nil {
			continue // of a decoded document; the number of results would differ
		}
		b.Write(content)
	}
	return b.Bytes()
}

// addPolicies adds what sluice-policy says about the policies.
func (r *report) addPolicies(results []policy.Verdict) error {
	if len(results) != len(r.policies) {
		return fmt.Errorf("sluice-policy checked %d of %d policies; it may have another version", len(results),
			len(r.policies))
	}
	for i, of := range results {
		name := nameOf(r.policies[i])
		before := len(r.Missing) + len(r.Differs)
		for _, p := range of.Problems {
			r.Missing = append(r.Missing, finding{From: name, Text: "refused: " + p})
		}
		for _, field := range of.Dropped {
			r.Missing = append(r.Missing, finding{From: name, Text: field + ": no such field; it would be ignored"})
		}
		for _, w := range of.Unsupported {
			r.Missing = append(r.Missing, finding{From: name, Text: w})
		}
		for _, n := range of.Other {
			r.Differs = append(r.Differs, finding{From: name, Text: n})
		}
		if len(r.Missing)+len(r.Differs) == before {
			r.Works = append(r.Works, finding{From: name, Text: "accepted, and enforced as written"})
		}
	}
	return nil
}

// finish sorts the findings and removes repetitions, such as a setting in cilium-config and in the values.
func (r *report) finish() {
	for _, list := range []*[]finding{&r.Works, &r.Differs, &r.Missing} {
		slices.SortStableFunc(*list, func(a, b finding) int { return strings.Compare(a.From, b.From) })
		*list = slices.Compact(*list)
	}
	slices.Sort(r.NotCompared)
	r.NotCompared = slices.Compact(r.NotCompared)
}

// set adds a value of Sluice's chart at a path with dots.
func (r *report) set(path string, v any) {
	at := r.Values
	keys := strings.Split(path, ".")
	for _, key := range keys[:len(keys)-1] {
		next, ok := at[key].(map[string]any)
		if !ok {
			next = map[string]any{}
			at[key] = next
		}
		at = next
	}
	at[keys[len(keys)-1]] = v
}

func (r *report) write(w io.Writer) {
	for _, section := range []struct {
		title    string
		findings []finding
	}{{"Works unchanged", r.Works}, {"Differs", r.Differs}, {"Missing", r.Missing}} {
		fmt.Fprintf(w, "%s: %d\n", section.title, len(section.findings))
		for _, f := range section.findings {
			from := f.From
			if f.Value != "" {
				from += "=" + f.Value
			}
			fmt.Fprintf(w, "  %s: %s\n", output.Printable(from), output.Printable(f.Text))
		}
		fmt.Fprintln(w)
	}
	if len(r.NotCompared) > 0 {
		fmt.Fprintf(w, "Not compared: %s, which most often tune Cilium itself\n",
			output.Plural(len(r.NotCompared), "setting", "settings"))
		fmt.Fprintf(w, "  %s\n\n", output.Printable(strings.Join(r.NotCompared, ", ")))
	}
	fmt.Fprintln(w, "Values for deploy/helm/sluice:")
	if len(r.Values) == 0 {
		fmt.Fprintln(w, "  {}")
		return
	}
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(r.Values); err != nil {
		fmt.Fprintln(w, err)
		return
	}
	for line := range strings.Lines(b.String()) {
		fmt.Fprint(w, "  "+line)
	}
}
