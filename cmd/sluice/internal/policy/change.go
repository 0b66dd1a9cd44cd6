// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// changeFlags are the flags of commands that change policies.
type changeFlags struct {
	files        []string
	namespace    string
	allowUnknown bool
	skipOthers   bool
	manager      string
	expect       invocation.Revision
	prune        bool
	validate     bool
	wait         invocation.Wait
}

func (o *changeFlags) add(cmd *cobra.Command, files string) {
	f := cmd.Flags()
	f.StringArrayVarP(&o.files, "filename", "f", nil, files)
	f.StringVarP(&o.namespace, "namespace", "n", "", "namespace of objects without one (default \"default\")")
	invocation.ValidateFlag(cmd, &o.validate, "check and compile; change nothing")
	f.StringVar(&o.manager, "manager", "", "act on the policies of this program only; each program has its own set")
	o.expect.Flag(cmd, "the policy revision")
	o.wait.Flag(cmd)
}

func applyCommand(inv *invocation.Invocation) *cobra.Command {
	var o changeFlags
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Add or replace policies, all or none",
		Long: fmt.Sprintf(`Add or replace policies of this node from files, from the YAML and JSON files of a directory,
or from standard input, all or none, and wait until the kernel enforces them. The exit code
is %d if the policy service has accepted them but the kernel does not enforce them (yet).`,
			invocation.ExitNotReady),
		Args: onlyFiles,
		RunE: func(cmd *cobra.Command, _ []string) error { return apply(cmd.Context(), inv, cmd.InOrStdin(), o) },
	}
	o.add(cmd, "file, directory or - for standard input; may be repeated")
	manifestFlags(cmd, &o.allowUnknown, &o.skipOthers)
	cmd.Flags().BoolVar(&o.prune, "prune", false, "delete the other policies of --manager")
	return cmd
}

func apply(ctx context.Context, inv *invocation.Invocation, stdin io.Reader, o changeFlags) error {
	if len(o.files) == 0 {
		return invocation.Usagef("nothing to apply: name it with -f FILE, -f DIRECTORY or -f -")
	}
	if o.prune && o.manager == "" {
		return invocation.Usagef("--prune deletes the other policies of a program: name the program with --manager NAME")
	}
	docs, err := readPolicies(inv, o.files, stdin, o.skipOthers)
	if err == nil {
		err = manifest.Fits(docs)
	}
	if err != nil {
		return alsoRefused(ctx, inv, err, docs, o.namespace, o.allowUnknown)
	}
	if o.prune {
		return makeChange(ctx, inv, o, docs, client.ReplacePolicies, &policyv1.ReplacePoliciesRequest{
			Manifests: manifest.Join(docs), DefaultNamespace: o.namespace, ValidateOnly: o.validate,
			AllowUnknownFields: o.allowUnknown, Manager: o.manager, IfRevision: o.expect.Expected(),
		})
	}
	return makeChange(ctx, inv, o, docs, client.UpsertPolicies, &policyv1.UpsertPoliciesRequest{
		Manifests: manifest.Join(docs), DefaultNamespace: o.namespace, ValidateOnly: o.validate,
		AllowUnknownFields: o.allowUnknown, Manager: o.manager, IfRevision: o.expect.Expected(),
	})
}

// alsoRefused adds errors about the readable documents, which the policy service only checks, to an error about
// unreadable documents.
func alsoRefused(ctx context.Context, inv *invocation.Invocation, err error, docs []manifest.Document, namespace string,
	allowUnknown bool,
) error {
	if _, ok := errors.AsType[manifest.FileErrors](err); !ok || len(docs) == 0 || manifest.Fits(docs) != nil {
		return err
	}
	_, refused := invocation.Ask(ctx, inv, invocation.Policy, client.UpsertPolicies, &policyv1.UpsertPoliciesRequest{
		Manifests: manifest.Join(docs), DefaultNamespace: namespace, ValidateOnly: true, AllowUnknownFields: allowUnknown,
	})
	if status.Code(refused) != codes.InvalidArgument { // the documents are valid, or the service did not answer
		return err
	}
	return fmt.Errorf("%w\n%w", err, manifest.InDocuments(refused, docs))
}

func deleteCommand(inv *invocation.Invocation) *cobra.Command {
	var o changeFlags
	cmd := &cobra.Command{
		Use:   "delete (-f FILE | KIND [NAMESPACE/]NAME... | KIND/[NAMESPACE/]NAME...)",
		Short: "Delete policies that were applied with `policy apply`",
		Long: fmt.Sprintf(`Delete policies of this node by name, or the policies in files, a directory or standard
input, all or none, and wait until the kernel enforces the change. Deleting a policy that does not exist
succeeds. The exit code is %d if the policy service has deleted them but the kernel still
enforces them.`, invocation.ExitNotReady),
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, a []string) error {
			return deletePolicies(cmd.Context(), inv, cmd.InOrStdin(), invocation.WithoutWait(cmd, a), o)
		},
	}
	o.add(cmd, "file, directory or - for standard input with the policies to delete; may be repeated")
	return cmd
}

// keysNamed returns the keys of the policies in the arguments or in the files.
func keysNamed(a, files []string, namespace string, stdin io.Reader) ([]*policyv1.PolicyKey, error) {
	var keys []*policyv1.PolicyKey
	switch {
	case len(a) > 0 && len(files) > 0:
		return nil, invocation.Usagef("give policies either with -f or as KIND NAME, not both")
	case len(a) == 0 && len(files) == 0:
		return nil, invocation.Usagef("no policy given: want -f FILE or KIND [NAMESPACE/]NAME")
	case len(a) > 0:
		return policykind.KeysNamed(a, namespace)
	}
	docs, err := manifest.Read(files, stdin)
	if err != nil {
		return nil, err
	}
	for _, d := range docs {
		if d.Key.GetKind() == "" || d.Key.GetName() == "" {
			return nil, fmt.Errorf("%s has no kind or no metadata.name", d.Place())
		}
		keys = append(keys, policykind.Complete(d.Key, namespace))
	}
	return keys, nil
}

func deletePolicies(ctx context.Context, inv *invocation.Invocation, stdin io.Reader, a []string, o changeFlags) error {
	keys, err := keysNamed(a, o.files, o.namespace, stdin)
	if err != nil {
		return err
	}
	for _, name := range policykind.KindsAmong(a) {
		inv.Note(fmt.Sprintf("%q is the name of a kind, but is used as the name of a policy; policies of several kinds are "+
			"KIND/[NAMESPACE/]NAME", name))
	}
	return makeChange(ctx, inv, o, nil, client.DeletePolicies, &policyv1.DeletePoliciesRequest{
		Keys: keys, ValidateOnly: o.validate, Manager: o.manager, IfRevision: o.expect.Expected(),
	})
}

// answer is the policy service's answer to a change.
type answer interface {
	proto.Message
	GetRevision() uint64
	GetChanges() []*policyv1.PolicyChange
}

// makeChange makes a change, waits until the kernel enforces it, and prints the result. docs are the documents that
// were sent, if any.
func makeChange[Q any, R answer](ctx context.Context, inv *invocation.Invocation, o changeFlags,
	docs []manifest.Document, call func(client, context.Context, *Q, ...grpc.CallOption) (R, error), request *Q,
) error {
	began := time.Now()
	r, err := invocation.Ask(ctx, inv, invocation.Policy, call, request)
	if err != nil && docs != nil {
		err = manifest.InDocuments(err, docs)
	}
	if err != nil {
		return err
	}
	localNode := invocation.BeginAskLocalNode(ctx, inv)
	changes := r.GetChanges()
	outcome := invocation.Outcome{
		Revision: r.GetRevision(), ValidateOnly: o.validate, Waited: !o.validate && !o.wait.Off(),
	}
	if outcome.Waited {
		if err := awaitRevision(ctx, inv, r.GetRevision(), o.wait.Limit(inv.Timeout)); err != nil {
			outcome.Pending = err.Error()
		}
	}
	outcome.Took = time.Since(began).Round(time.Millisecond)
	outcome.Node = localNode()
	shown := make([]message.Object, len(changes))
	for i, ch := range changes {
		shown[i] = message.Of(ch)
		where := policykind.KeyText(ch.GetKey()) + ": "
		if i < len(docs) && len(docs) <= len(changes) {
			where = docs[i].Place() + ": " + where
			shown[i] = message.Of(ch, docs[i].Facts()...)
		}
		for _, field := range ch.GetDroppedFields() {
			fmt.Fprintln(inv.ErrOut, output.Printable("warning: "+where+field+": no such field; it is ignored"))
		}
		for _, n := range withOmitted(ch.GetNotes(), ch.GetOmittedNoteCount()) {
			fmt.Fprintln(inv.ErrOut, output.Printable(noteLabel(n)+where+noteText(n)))
		}
	}
	facts := append([]message.Fact{{Key: "changes", Value: shown}}, outcome.Facts()...)
	if err := inv.Show(message.Of(r, facts...), func(w io.Writer) {
		for _, ch := range changes {
			output.Row(w, policykind.KeyText(ch.GetKey()), output.Enum(ch.GetType(), "CHANGE_TYPE_"))
		}
		outcome.Write(w, "the policy service")
	}); err != nil {
		return err
	}
	return outcome.Err()
}

// awaitRevision waits until a datapath is connected and the kernel enforces the revision. If that does not happen in
// time, it returns the reason.
func awaitRevision(ctx context.Context, inv *invocation.Invocation, revision uint64, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	request := &policyv1.WaitForRevisionRequest{Revision: revision}
	defer inv.Progress(func() string { return fmt.Sprintf("waiting until the kernel enforces revision %d", revision) })()
	r, err := invocation.Ask(ctx, inv, invocation.Policy, client.WaitForRevision, request)
	if err != nil {
		st, _ := status.FromError(err)
		if st.Code() == codes.DeadlineExceeded {
			return fmt.Errorf("timed out after %s; `sluice status` shows the progress", limit)
		}
		return errors.New(st.Message())
	}
	if away := r.GetDisconnected(); len(away) > 0 {
		return fmt.Errorf("not connected: %s", strings.Join(away, ", "))
	}
	// Ignore subscribers that only watch the tables and program no kernel.
	if len(r.GetEnforcing()) == 0 {
		return errors.New("no datapath is connected to the policy service")
	}
	return nil
}
