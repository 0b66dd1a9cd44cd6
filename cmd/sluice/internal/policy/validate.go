// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// program is the name of the policy service's program, which can check manifests offline with the same code.
const program = "sluice-policy"

func validateCommand(inv *invocation.Invocation) *cobra.Command {
	var (
		files        []string
		namespace    string
		allowUnknown bool
		skipOthers   bool
		nodeLabels   bool
		dnsProxy     bool
		dnsImplicit  bool
		httpProxy    bool
		strict       bool
		againstNode  bool
	)
	cmd := &cobra.Command{
		Use:   "validate -f FILE",
		Short: "Check manifests offline as the policy service would, for CI of manifests",
		Long: `Check manifests as the policy service would, without a running service: the command
executes ` + program + ` from its own directory or from PATH. Every problem is reported
with file, document and field. The exit code is 1 if there are problems. The check assumes
the default settings of the service, apart from --cluster-node-labels, --dns-proxy,
--dns-implicit and --http-proxy.

A warning names each toFQDNs list whose pods no DNS rule of the manifests selects. With
--against-node, the DNS rules of the accepted policies of this node count, too.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, a []string) error {
			files = append(files, a...)
			if len(files) == 0 {
				return invocation.Usagef("nothing to check: name it with -f FILE, -f DIRECTORY or -f -")
			}
			docs, err := readPolicies(inv, files, cmd.InOrStdin(), skipOthers)
			var broken manifest.FileErrors
			if err != nil && !errors.As(err, &broken) {
				return err
			}
			var flags []string // of the program
			if allowUnknown {
				flags = append(flags, "--allow-unknown-fields")
			}
			if nodeLabels {
				flags = append(flags, "--cluster-node-labels")
			}
			if !dnsProxy {
				flags = append(flags, "--dns-proxy=false")
			}
			if httpProxy {
				flags = append(flags, "--http-proxy")
			}
			if dnsImplicit {
				flags = append(flags, "--dns-implicit")
			}
			return validate(cmd.Context(), inv, docs, broken, namespace, flags, strict, againstNode)
		},
	}
	manifestFlags(cmd, &allowUnknown, &skipOthers)
	f := cmd.Flags()
	f.StringArrayVarP(&files, "filename", "f", nil, "file, directory or - for standard input; may be repeated")
	f.BoolVar(&nodeLabels, "cluster-node-labels", false,
		"the nodes have the setting cluster.nodeLabels, which the Kubernetes manifests set")
	f.BoolVar(&dnsProxy, "dns-proxy", true, "the nodes have the setting dns.proxy, so sluice-dns evaluates DNS rules")
	f.BoolVar(&httpProxy, "http-proxy", false,
		"the nodes have the setting http.proxy, so sluice-http evaluates HTTP rules and server names")
	f.BoolVar(&dnsImplicit, "dns-implicit", false,
		"the nodes have the setting dns.implicit, so a plain rule for port 53 serves in place of a DNS rule")
	f.StringVarP(&namespace, "namespace", "n", "", "namespace of objects without one (default \"default\")")
	f.BoolVar(&strict, "strict", false,
		"fail if a policy is enforced more strictly than written, or lacks a DNS rule")
	f.BoolVar(&againstNode, "against-node", false,
		"also look for DNS rules in the accepted policies of this node, without changing them")
	return cmd
}

// checked is the result for one document in `policy validate -o json`.
type checked struct {
	File      string   `json:"file"`
	Document  int      `json:"document,omitempty"` // 0: the file could not be read
	Item      int      `json:"item,omitempty"`     // of a list
	Line      int      `json:"line,omitempty"`
	Kind      string   `json:"kind,omitempty"`
	Namespace string   `json:"namespace,omitempty"`
	Name      string   `json:"name,omitempty"`
	Problems  []string `json:"problems"`
	Dropped   []string `json:"droppedFields,omitempty"`
	Notes     notes    `json:"notes,omitempty"`
}

// notes have the JSON form of the policy service's notes.
type notes = message.Items[*policyv1.PolicyNote]

// verdictOnDocument is one line of the output of `sluice-policy validate`, which prints a line for each document of
// its standard input.
type verdictOnDocument struct {
	Problems []string `json:"problems"`
	Dropped  []string `json:"droppedFields"`
	Notes    notes    `json:"notes"`
}

// validate checks documents. With strict, notes about policies that allow less than they say are errors. With
// againstNode, DNS rules of accepted policies of this node count, too.
func validate(ctx context.Context, inv *invocation.Invocation, docs []manifest.Document, broken manifest.FileErrors,
	namespace string, flags []string, strict, againstNode bool,
) error {
	var verdicts []verdictOnDocument
	if len(docs) > 0 {
		var err error
		if verdicts, err = checkOffline(ctx, manifest.Join(docs), namespace, flags); err != nil {
			return err
		}
	}
	if len(verdicts) != len(docs) {
		return fmt.Errorf("%s checked %d of %d documents; it may have another version", program, len(verdicts),
			len(docs))
	}
	if againstNode {
		if err := withDNSRulesInForce(ctx, inv, docs, verdicts, namespace); err != nil {
			return err
		}
	}
	all := make([]checked, 0, len(docs))
	refused, closed, failed := 0, 0, len(broken) > 0
	for i, d := range docs {
		key := policykind.Complete(d.Key, namespace)
		one := checked{
			File: d.File, Document: d.Index, Item: d.Item, Line: d.Line, Kind: key.GetKind(), Namespace: key.GetNamespace(),
			Name:     key.GetName(),
			Problems: append([]string{}, verdicts[i].Problems...), Dropped: verdicts[i].Dropped, Notes: verdicts[i].Notes,
		}
		if len(one.Problems) > 0 {
			refused++
		} else if slices.ContainsFunc(one.Notes, unsupported) {
			closed++
		}
		failed = failed || len(one.Problems) > 0 || strict && slices.ContainsFunc(one.Notes, fails)
		all = append(all, one)
	}
	shown := all
	for _, f := range broken {
		shown = append(shown, checked{
			File: f.File, Document: f.Document, Line: f.Line, Problems: []string{f.Err.Error()},
		})
	}
	if err := inv.Show(shown, func(w io.Writer) {
		for _, f := range broken {
			fmt.Fprintln(w, output.Printable(f.Err.Error()))
		}
		for i, d := range all {
			for _, p := range d.Problems {
				fmt.Fprintln(w, docs[i].Problem(p))
			}
			for _, field := range d.Dropped {
				fmt.Fprintln(w, docs[i].Problem("warning: "+field+": no such field; it would be ignored"))
			}
			for _, n := range d.Notes {
				label := noteLabel(n)
				if strict && fails(n) {
					label = "error: "
				}
				fmt.Fprintln(w, docs[i].Problem(label+noteText(n)))
			}
		}
		switch {
		case len(broken) > 0 && len(all) == 0:
			fmt.Fprintf(w, "%s cannot be read.\n", output.Plural(broken.Files(), "file", "files"))
		case len(broken) > 0:
			fmt.Fprintf(w, "%d of %d policies would be refused; files that cannot be read: %d.\n", refused, len(all),
				broken.Files())
		case refused > 0:
			fmt.Fprintf(w, "%d of %d policies would be refused%s.\n", refused, len(all), allowLess(closed, len(all)))
		case len(all) == 1:
			fmt.Fprintf(w, "%s would be accepted%s.\n",
				output.Printable(policykind.KeyText(&policyv1.PolicyKey{
					Kind: all[0].Kind, Namespace: all[0].Namespace,
					Name: all[0].Name,
				})), allowLess(closed, len(all)))
		default:
			fmt.Fprintf(w, "All %d policies would be accepted%s.\n", len(all), allowLess(closed, len(all)))
		}
	}); err != nil {
		return err
	}
	if failed {
		return invocation.ErrReported
	}
	return nil
}

// withDNSRulesInForce removes the notes about missing DNS rules that do not apply with the policies of the node. The
// service checks the documents, and changes nothing.
func withDNSRulesInForce(ctx context.Context, inv *invocation.Invocation, docs []manifest.Document,
	verdicts []verdictOnDocument, namespace string,
) error {
	var sent []manifest.Document
	var places []int
	for i, v := range verdicts {
		if len(v.Problems) == 0 {
			sent, places = append(sent, docs[i]), append(places, i)
		}
	}
	if !slices.ContainsFunc(verdicts, func(v verdictOnDocument) bool {
		return slices.ContainsFunc(v.Notes, withoutDNSRule)
	}) {
		return nil
	}
	if err := manifest.Fits(sent); err != nil {
		return err
	}
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.UpsertPolicies, &policyv1.UpsertPoliciesRequest{
		Manifests: manifest.Join(sent), DefaultNamespace: namespace, ValidateOnly: true, AllowUnknownFields: true,
	})
	if err != nil {
		return fmt.Errorf("check against the policies of this node: %w", manifest.InDocuments(err, sent))
	}
	if len(r.GetChanges()) != len(sent) {
		return fmt.Errorf("the policy service checked %d of %d documents; it may have another version",
			len(r.GetChanges()), len(sent))
	}
	for k, change := range r.GetChanges() {
		v := &verdicts[places[k]]
		v.Notes = slices.DeleteFunc(v.Notes, func(n *policyv1.PolicyNote) bool {
			return withoutDNSRule(n) && !slices.ContainsFunc(change.GetNotes(), func(of *policyv1.PolicyNote) bool {
				return withoutDNSRule(of) && of.GetField() == n.GetField()
			})
		})
	}
	return nil
}

// withoutDNSRule reports whether a note is about DNS names without a DNS rule.
func withoutDNSRule(n *policyv1.PolicyNote) bool {
	return n.GetKind() == policyv1.PolicyNoteKind_POLICY_NOTE_KIND_NO_DNS_RULE
}

// fails reports whether --strict makes a note an error.
func fails(n *policyv1.PolicyNote) bool { return withoutDNSRule(n) || unsupported(n) }

// allowLess returns the part of the summary about accepted policies that allow less than written, because of
// unsupported fields.
func allowLess(closed, all int) string {
	const why = ", because of unsupported fields"
	switch {
	case closed == 0:
		return ""
	case all == 1:
		return "; it allows less than it says" + why
	case closed == 1:
		return "; 1 allows less than it says" + why
	}
	return fmt.Sprintf("; %d allow less than they say%s", closed, why)
}

func unsupported(n *policyv1.PolicyNote) bool {
	return n.GetKind() == policyv1.PolicyNoteKind_POLICY_NOTE_KIND_UNSUPPORTED
}

// checkOffline checks a stream of documents with the policy service's program, which receives the flags.
func checkOffline(ctx context.Context, manifests []byte, namespace string, flags []string) ([]verdictOnDocument,
	error,
) {
	program, err := findProgram()
	if err != nil {
		return nil, err
	}
	args := append([]string{"validate", "--namespace=" + namespace}, flags...)
	cmd := exec.CommandContext(ctx, program, args...)
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(manifests), &out, &errOut
	if err := cmd.Run(); err != nil {
		if text := strings.TrimSpace(errOut.String()); text != "" {
			return nil, errors.New(text) // the text names the program
		}
		return nil, fmt.Errorf("%s validate: %w", program, err)
	}
	var all []verdictOnDocument
	for decoder := json.NewDecoder(&out); ; {
		var one verdictOnDocument
		err := decoder.Decode(&one)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s validate: %w", program, err)
		}
		all = append(all, one)
	}
}

// Verdict is what sluice-policy says about one document.
type Verdict struct {
	Problems    []string // for which it is refused
	Dropped     []string // fields that do not exist
	Unsupported []string // parts of an accepted policy that allow less than they say
	Other       []string // further notes
}

// CheckOffline checks a stream of documents as `policy validate` does, with flags of sluice-policy. It returns a
// verdict for each document.
func CheckOffline(ctx context.Context, manifests []byte, flags []string) ([]Verdict, error) {
	results, err := checkOffline(ctx, manifests, "", flags)
	if err != nil {
		return nil, err
	}
	all := make([]Verdict, len(results))
	for i, of := range results {
		all[i].Problems, all[i].Dropped = of.Problems, of.Dropped
		for _, n := range of.Notes {
			if unsupported(n) {
				all[i].Unsupported = append(all[i].Unsupported, noteText(n))
			} else {
				all[i].Other = append(all[i].Other, noteText(n))
			}
		}
	}
	return all, nil
}

// findProgram returns the path of the policy service's program: in the directory of this program, or else in PATH.
func findProgram() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	beside := filepath.Join(filepath.Dir(self), program)
	if _, err := os.Stat(beside); err == nil {
		return beside, nil
	}
	path, err := exec.LookPath(program)
	if err != nil {
		return "", fmt.Errorf("%s, which checks manifests, is neither at %s nor in PATH", program, beside)
	}
	return path, nil
}
