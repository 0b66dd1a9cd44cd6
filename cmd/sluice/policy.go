// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

func (c *command) policyCommand() *cobra.Command {
	return group("policy", "Apply, check and explain network policies",
		c.policyApplyCommand(), c.policyDeleteCommand(), c.policyConfirmCommand(), c.policyListCommand(), c.policyGetCommand(),
		c.policyExplainCommand(), c.policyDiffCommand(), c.policyValidateCommand(), c.policyTableCommand())
}

// withPolicy calls fn with a client of the policy service and a bounded
// context.
func (c *command) withPolicy(ctx context.Context, fn func(context.Context, policyv1.PolicyServiceClient) error) error {
	conn, err := c.dial("policy")
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	return fn(ctx, policyv1.NewPolicyServiceClient(conn))
}

// wait is the value of --wait: how long to wait until the kernel enforces a
// change.
type wait struct {
	off   bool
	limit time.Duration // 0: that of --timeout
}

func (w *wait) String() string {
	switch {
	case w.off:
		return "false"
	case w.limit == 0:
		return "true"
	default:
		return w.limit.String()
	}
}

func (w *wait) Set(text string) error {
	if on, err := strconv.ParseBool(text); err == nil {
		*w = wait{off: !on}
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return errors.New("want true, false or a time such as 5s")
	}
	*w = wait{limit: d}
	return nil
}

func (*wait) Type() string { return "wait" }

// changeFlags are those of commands that change policies.
type changeFlags struct {
	files        []string
	namespace    string
	allowUnknown bool
	skipOthers   bool
	manager      string
	ifRevision   int64
	prune        bool
	validate     bool
	wait         wait
}

// revision is the value of --if-revision; nil if it was not given.
func (o *changeFlags) revision() *uint64 {
	if o.ifRevision < 0 {
		return nil
	}
	n := uint64(o.ifRevision)
	return &n
}

func (o *changeFlags) add(cmd *cobra.Command, files string) {
	f := cmd.Flags()
	f.StringArrayVarP(&o.files, "filename", "f", nil, files)
	f.StringVarP(&o.namespace, "namespace", "n", "", "namespace of what names none (default \"default\")")
	f.BoolVar(&o.validate, "validate-only", false, "check and compile, but change nothing")
	f.StringVar(&o.manager, "manager", "", "act as this program, whose policies are apart from those of others")
	f.Int64Var(&o.ifRevision, "if-revision", -1, "change nothing unless this is the policy revision (default: whatever it is)")
	f.Lookup("if-revision").DefValue = ""
	f.Var(&o.wait, "wait", "wait until the kernel enforces it, so long at most; false: do not wait (default: as --timeout)")
	f.Lookup("wait").NoOptDefVal = "true"
	f.Lookup("wait").DefValue = ""
}

func (c *command) policyApplyCommand() *cobra.Command {
	var o changeFlags
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Add or replace policies, all of them or none",
		Long: fmt.Sprintf(`Add or replace the policies of files, of the YAML and JSON files of a directory,
or of standard input, all of them or none; and wait until the kernel enforces
them. The exit code is %d if they are in force in the policy service, but not
(yet) in the kernel.`, exitNotReady),
		Args: onlyFiles,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.policyApply(cmd.Context(), cmd.InOrStdin(), o) },
	}
	o.add(cmd, "file, directory or - for standard input; may be repeated")
	manifestFlags(cmd, &o.allowUnknown, &o.skipOthers)
	cmd.Flags().BoolVar(&o.prune, "prune", false, "delete the other policies of --manager")
	return cmd
}

// manifestFlags are flags of commands that send manifests.
func manifestFlags(cmd *cobra.Command, allowUnknown, skipOthers *bool) {
	cmd.Flags().BoolVar(allowUnknown, "allow-unknown-fields", false, "warn of fields that a kind does not have, and ignore them")
	cmd.Flags().BoolVar(skipOthers, "skip-other-kinds", false, "leave out objects that are no policies")
}

// readPolicies is readManifests without objects that are no policies, if those
// are to be left out.
func (c *command) readPolicies(files []string, stdin io.Reader, skipOthers bool) ([]document, error) {
	docs, err := readManifests(files, stdin)
	if !skipOthers {
		return docs, err
	}
	kept, others := policiesOnly(docs)
	for _, text := range others {
		fmt.Fprintln(c.errOut, "note: "+text)
	}
	if err == nil && len(kept) == 0 {
		err = errors.New("there is no policy among the objects")
	}
	return kept, err
}

// onlyFiles refuses arguments where files are named with -f.
func onlyFiles(cmd *cobra.Command, a []string) error {
	if len(a) > 0 {
		return usagef("%s takes no argument; name files with -f, as in `%s -f %s`", cmd.CommandPath(), cmd.CommandPath(), a[0])
	}
	return nil
}

// policyChange is what became of one policy.
type policyChange struct {
	Kind      string   `json:"kind"`
	Namespace string   `json:"namespace,omitempty"`
	Name      string   `json:"name"`
	Change    string   `json:"change"`
	File      string   `json:"file,omitempty"`
	Document  int      `json:"document,omitempty"`
	Dropped   []string `json:"droppedFields,omitempty"`
	Notes     []note   `json:"notes,omitempty"`
}

// note is something about an accepted policy that its author should know.
type note struct {
	Kind  string `json:"kind"`
	Field string `json:"field,omitempty"`
	Text  string `json:"text"`
}

// String is "field: text".
func (n note) String() string {
	if n.Field == "" {
		return n.Text
	}
	return n.Field + ": " + n.Text
}

// label is how much attention a note wants.
func (n note) label() string {
	if n.Kind == noteSelectsNothing {
		return "note: "
	}
	return "warning: "
}

// noteSelectsNothing is the kind of a note on a policy without an endpoint.
const noteSelectsNothing = "selects-nothing"

func notesOf(list []*policyv1.PolicyNote) []note {
	var all []note
	for _, n := range list {
		all = append(all, note{enum(n.GetKind(), "POLICY_NOTE_KIND_"), n.GetField(), n.GetText()})
	}
	return all
}

// policyChanges is what `policy apply` and `policy delete` print.
type policyChanges struct {
	Revision  uint64         `json:"revision"`
	Validated bool           `json:"validatedOnly,omitempty"`
	Changes   []policyChange `json:"changes"`
	// Enforced says whether the kernel enforces the revision; unset if that was
	// not waited for.
	Enforced *bool  `json:"enforced,omitempty"`
	Pending  string `json:"pending,omitempty"` // why not
	Took     string `json:"-"`
}

func changesOf(changes []*policyv1.PolicyChange, docs []document) []policyChange {
	all := make([]policyChange, 0, len(changes))
	for i, ch := range changes {
		shown := policyChange{
			Kind: ch.GetKey().GetKind(), Namespace: ch.GetKey().GetNamespace(), Name: ch.GetKey().GetName(),
			Change: enum(ch.GetType(), "CHANGE_TYPE_"), Dropped: ch.GetDroppedFields(), Notes: notesOf(ch.GetNotes()),
		}
		if i < len(docs) && len(docs) <= len(changes) {
			shown.File, shown.Document = docs[i].file, docs[i].index
		}
		all = append(all, shown)
	}
	return all
}

func (c *command) policyApply(ctx context.Context, stdin io.Reader, o changeFlags) error {
	if len(o.files) == 0 {
		return usagef("nothing to apply: name it with -f FILE, -f DIRECTORY or -f -")
	}
	if o.prune && o.manager == "" {
		return usagef("--prune deletes what else a program brought: name it with --manager NAME")
	}
	docs, err := c.readPolicies(o.files, stdin, o.skipOthers)
	if err != nil {
		return err
	}
	return c.change(ctx, o, docs, func(ctx context.Context, client policyv1.PolicyServiceClient) (*policyChanges, error) {
		if o.prune {
			r, err := client.ReplacePolicies(ctx, &policyv1.ReplacePoliciesRequest{
				Manifests: join(docs), DefaultNamespace: o.namespace, ValidateOnly: o.validate, AllowUnknownFields: o.allowUnknown,
				Manager: o.manager, IfRevision: o.revision(),
			})
			if err != nil {
				return nil, inDocuments(err, docs)
			}
			return &policyChanges{Revision: r.GetRevision(), Changes: changesOf(r.GetChanges(), docs)}, nil
		}
		r, err := client.UpsertPolicies(ctx, &policyv1.UpsertPoliciesRequest{
			Manifests: join(docs), DefaultNamespace: o.namespace, ValidateOnly: o.validate, AllowUnknownFields: o.allowUnknown,
			Manager: o.manager, IfRevision: o.revision(),
		})
		if err != nil {
			return nil, inDocuments(err, docs)
		}
		return &policyChanges{Revision: r.GetRevision(), Changes: changesOf(r.GetChanges(), docs)}, nil
	})
}

func (c *command) policyDeleteCommand() *cobra.Command {
	var o changeFlags
	cmd := &cobra.Command{
		Use:   "delete (-f FILE | KIND [NAMESPACE/]NAME...)",
		Short: "Delete policies that `policy apply` brought",
		Long: fmt.Sprintf(`Delete policies by name, or those that files, a directory or standard input name,
all of them or none; and wait until the kernel enforces that. Deleting what does not exist
succeeds. The exit code is %d if they are gone from the policy service, but not
(yet) from the kernel.`, exitNotReady),
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, a []string) error {
			return c.policyDelete(cmd.Context(), cmd.InOrStdin(), a, o)
		},
	}
	o.add(cmd, "file, directory or - for standard input that names the policies; may be repeated")
	return cmd
}

// keysNamed are the keys of the arguments KIND NAME..., or of files.
func keysNamed(a, files []string, namespace string, stdin io.Reader) ([]*policyv1.PolicyKey, error) {
	var keys []*policyv1.PolicyKey
	switch {
	case len(a) > 0 && len(files) > 0:
		return nil, usagef("name policies either with -f or as KIND NAME, not both")
	case len(a) == 0 && len(files) == 0:
		return nil, usagef("nothing named: want -f FILE or KIND [NAMESPACE/]NAME")
	case len(a) == 1:
		return nil, usagef("%q: want a kind and a name, such as NetworkPolicy shop/web", a[0])
	}
	if len(a) > 0 {
		for _, name := range a[1:] {
			key, err := keyNamed(a[0], name, namespace)
			if err != nil {
				return nil, err
			}
			keys = append(keys, key)
		}
		return keys, nil
	}
	docs, err := readManifests(files, stdin)
	if err != nil {
		return nil, err
	}
	for _, d := range docs {
		if d.key.GetKind() == "" || d.key.GetName() == "" {
			return nil, fmt.Errorf("%s has no kind or no metadata.name", d.place())
		}
		keys = append(keys, complete(d.key, namespace))
	}
	return keys, nil
}

func (c *command) policyDelete(ctx context.Context, stdin io.Reader, a []string, o changeFlags) error {
	keys, err := keysNamed(a, o.files, o.namespace, stdin)
	if err != nil {
		return err
	}
	return c.change(ctx, o, nil, func(ctx context.Context, client policyv1.PolicyServiceClient) (*policyChanges, error) {
		r, err := client.DeletePolicies(ctx, &policyv1.DeletePoliciesRequest{
			Keys: keys, ValidateOnly: o.validate, Manager: o.manager, IfRevision: o.revision(),
		})
		if err != nil {
			return nil, err
		}
		return &policyChanges{Revision: r.GetRevision(), Changes: changesOf(r.GetChanges(), nil)}, nil
	})
}

// change makes a change, waits until it is enforced, and shows both.
func (c *command) change(ctx context.Context, o changeFlags, docs []document, call func(context.Context, policyv1.PolicyServiceClient) (*policyChanges, error)) error {
	began := time.Now()
	var done *policyChanges
	if err := c.withPolicy(ctx, func(ctx context.Context, client policyv1.PolicyServiceClient) (err error) {
		done, err = call(ctx, client)
		return err
	}); err != nil {
		return err
	}
	done.Validated = o.validate
	if !o.validate && !o.wait.off {
		enforced := true
		if err := c.awaitRevision(ctx, done.Revision, o.wait.limit); err != nil {
			enforced, done.Pending = false, err.Error()
		}
		done.Enforced = &enforced
	}
	done.Took = time.Since(began).Round(time.Millisecond).String()
	for i, ch := range done.Changes {
		where := keyText(&policyv1.PolicyKey{Kind: ch.Kind, Namespace: ch.Namespace, Name: ch.Name}) + ": "
		if i < len(docs) && len(docs) <= len(done.Changes) {
			where = docs[i].place() + ": " + where
		}
		for _, field := range ch.Dropped {
			fmt.Fprintln(c.errOut, printable("warning: "+where+field+": no such field; it is ignored"))
		}
		for _, n := range ch.Notes {
			fmt.Fprintln(c.errOut, printable(n.label()+where+n.String()))
		}
	}
	if err := c.show(done, done.table); err != nil {
		return err
	}
	if done.Pending != "" {
		return errNotReady
	}
	return nil
}

func (p *policyChanges) table(w io.Writer) {
	for _, ch := range p.Changes {
		row(w, keyText(&policyv1.PolicyKey{Kind: ch.Kind, Namespace: ch.Namespace, Name: ch.Name}), ch.Change)
	}
	switch {
	case p.Validated:
		fmt.Fprintln(w, "Nothing was changed: --validate-only.")
	case p.Enforced == nil:
		fmt.Fprintf(w, "Revision %d is in force in the policy service; that of the kernel was not waited for.\n", p.Revision)
	case *p.Enforced:
		fmt.Fprintf(w, "The kernel enforces revision %d, after %s.\n", p.Revision, p.Took)
	default:
		fmt.Fprintln(w, printable(fmt.Sprintf("Revision %d is stored, but the kernel does not enforce it: %s.", p.Revision, p.Pending)))
	}
}

// awaitRevision returns nil when a datapath is connected and the kernel
// enforces the revision, else why it does not.
func (c *command) awaitRevision(ctx context.Context, revision uint64, limit time.Duration) error {
	if limit == 0 {
		limit = c.timeout
	}
	conn, err := c.dial("policy")
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	client := policyv1.NewPolicyServiceClient(conn)
	r, err := client.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Revision: revision})
	if err != nil {
		st, _ := status.FromError(err)
		if st.Code() == codes.DeadlineExceeded {
			return fmt.Errorf("not within %s; `sluice status` shows how far it is", limit)
		}
		return errors.New(reason(st))
	}
	if away := r.GetDisconnected(); len(away) > 0 {
		return fmt.Errorf("not connected: %s", strings.Join(away, ", "))
	}
	// Subscribers that only watch the tables say nothing about the kernel.
	if len(r.GetEnforcing()) == 0 {
		return errors.New("no datapath is connected to the policy service")
	}
	return nil
}

func (c *command) policyListCommand() *cobra.Command {
	var (
		kind, namespace, subject string
		short                    bool
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List policies with their state, and what was refused",
		Args:  args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			req := &policyv1.ListPoliciesRequest{Namespace: namespace}
			if kind != "" {
				k, err := kindNamed(kind)
				if err != nil {
					return err
				}
				req.Kind = k.name
			}
			if subject != "" {
				p, err := c.resolvePeer(cmd.Context(), subject)
				if err != nil {
					return err
				}
				if p.identity == 0 {
					return usagef("--subject: %q is not a pod or an identity", subject)
				}
				req.Subject = p.identity
			}
			return c.policyList(cmd.Context(), req, short)
		},
	}
	f := cmd.Flags()
	f.StringVar(&kind, "kind", "", "only this kind")
	f.StringVarP(&namespace, "namespace", "n", "", "only this namespace")
	f.StringVar(&subject, "subject", "", "only policies that select this pod or identity")
	f.BoolVar(&short, "refused", false, "only what was refused")
	return cmd
}

// policyState is what is shown of one policy.
type policyState struct {
	Kind      string     `json:"kind"`
	Namespace string     `json:"namespace,omitempty"`
	Name      string     `json:"name"`
	Source    string     `json:"source"`
	Manager   string     `json:"manager,omitempty"`
	Origin    string     `json:"origin,omitempty"`
	Accepted  bool       `json:"accepted"`
	Error     string     `json:"error,omitempty"`
	Revision  uint64     `json:"revision"`
	Subjects  []uint32   `json:"subjects"`
	Rules     uint32     `json:"rules"`
	Updated   *time.Time `json:"updateTime,omitempty"`
	Dropped   []string   `json:"droppedFields,omitempty"`
	Notes     []note     `json:"notes,omitempty"`
	Manifest  string     `json:"manifest,omitempty"`
}

func policyStateOf(p *policyv1.Policy) policyState {
	s := policyState{
		Kind: p.GetKey().GetKind(), Namespace: p.GetKey().GetNamespace(), Name: p.GetKey().GetName(),
		Source: p.GetSource(), Manager: p.GetManager(), Origin: p.GetOrigin(), Accepted: p.GetAccepted(), Error: p.GetError(), Revision: p.GetRevision(),
		Subjects: p.GetSubjects(), Rules: p.GetRules(), Updated: when(p.GetUpdateTime()), Dropped: p.GetDroppedFields(),
		Notes: notesOf(p.GetNotes()), Manifest: string(p.GetManifest()),
	}
	if s.Subjects == nil {
		s.Subjects = []uint32{}
	}
	return s
}

// state is what became of a policy, in a word or two.
func (p policyState) state() string {
	notes := len(p.remarks())
	switch {
	case p.Accepted && p.Error != "":
		return "outdated" // a newer form was refused
	case p.Accepted && notes == 1:
		return "accepted, 1 note"
	case p.Accepted && notes > 1:
		return fmt.Sprintf("accepted, %d notes", notes)
	case p.Accepted:
		return "accepted"
	default:
		return "refused"
	}
}

// remarks are the notes on a policy, and the fields that it lost. That it selects
// no endpoint of this node is in a column of its own.
func (p policyState) remarks() []string {
	var all []string
	for _, field := range p.Dropped {
		all = append(all, field+": no such field; it is ignored")
	}
	for _, n := range p.Notes {
		if n.Kind != noteSelectsNothing || n.Field != "" {
			all = append(all, n.String())
		}
	}
	return all
}

// title is the policy's name; of a file that could not be read as one, the
// file's.
func (p policyState) title() string {
	if p.Name == "" {
		return p.source()
	}
	return keyText(&policyv1.PolicyKey{Kind: p.Kind, Namespace: p.Namespace, Name: p.Name})
}

func (p policyState) source() string {
	switch {
	case p.Origin != "":
		return p.Source + ":" + p.Origin
	case p.Manager != "":
		return p.Source + ":" + p.Manager
	}
	return p.Source
}

func (c *command) policies(ctx context.Context, req *policyv1.ListPoliciesRequest) (all []policyState, revision uint64, err error) {
	all = []policyState{}
	err = c.withPolicy(ctx, func(ctx context.Context, client policyv1.PolicyServiceClient) error {
		stream, err := client.ListPolicies(ctx, req)
		if err != nil {
			return err
		}
		return each(stream, func(m *policyv1.ListPoliciesResponse) {
			revision = m.GetRevision()
			if m.GetPolicy() != nil {
				all = append(all, policyStateOf(m.GetPolicy()))
			}
		})
	})
	return all, revision, err
}

func (c *command) policyList(ctx context.Context, req *policyv1.ListPoliciesRequest, refused bool) error {
	all, _, err := c.policies(ctx, req)
	if err != nil {
		return err
	}
	if refused {
		all = slices.DeleteFunc(all, func(p policyState) bool { return p.Error == "" })
	}
	return c.show(all, func(w io.Writer) {
		row(w, "POLICY", "STATE", "REVISION", "SELECTS", "RULES", "AGE", "SOURCE")
		for _, p := range all {
			row(w, p.title(), p.state(), p.Revision, identitiesText(len(p.Subjects)), p.Rules, since(p.Updated), p.source())
		}
		first := true
		line := func(text string) {
			if first {
				fmt.Fprintln(w)
				first = false
			}
			fmt.Fprintln(w, printable(strings.TrimSpace(text)))
		}
		for _, p := range all {
			switch {
			case p.Error != "" && p.Accepted:
				line(p.title() + " stays as it is; a newer form was refused: " + p.Error)
			case p.Error != "":
				line(p.title() + " was refused: " + p.Error)
			}
			for _, text := range p.remarks() {
				line(p.title() + ": " + text)
			}
		}
	})
}

func identitiesText(n int) string {
	if n == 1 {
		return "1 identity"
	}
	return fmt.Sprintf("%d identities", n)
}

func (c *command) policyGetCommand() *cobra.Command {
	var namespace string
	cmd := &cobra.Command{
		Use:   "get KIND [NAMESPACE/]NAME",
		Short: "Print the manifest of a policy; with -o json its state too",
		Args:  args(2, "a kind and a name, such as NetworkPolicy shop/web"),
		RunE: func(cmd *cobra.Command, a []string) error {
			key, err := keyNamed(a[0], a[1], namespace)
			if err != nil {
				return err
			}
			return c.policyGet(cmd.Context(), key)
		},
	}
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace, if the name has none (default \"default\")")
	return cmd
}

func (c *command) policyGet(ctx context.Context, key *policyv1.PolicyKey) error {
	all, _, err := c.policies(ctx, &policyv1.ListPoliciesRequest{Kind: key.GetKind(), Namespace: key.GetNamespace(), Name: key.GetName(), WithManifests: true})
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return fmt.Errorf("there is no %s; see `sluice policy list`", keyText(key))
	}
	if c.format == "json" {
		return c.show(all[0], nil)
	}
	for _, p := range all {
		if p.Error != "" {
			fmt.Fprintln(c.errOut, printable("warning: a newer form was refused: "+p.Error))
		}
		for _, text := range p.remarks() {
			fmt.Fprintln(c.errOut, printable("warning: "+text))
		}
	}
	text := all[0].Manifest
	if !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	_, err = io.WriteString(c.out, text)
	return err
}
