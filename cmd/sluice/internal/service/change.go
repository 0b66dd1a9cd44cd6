// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
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
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

// fileFlags are the flags of commands that send manifests.
type fileFlags struct {
	files        []string
	namespace    string
	allowUnknown bool
	skipOthers   bool
}

func (o *fileFlags) add(cmd *cobra.Command, files string) {
	f := cmd.Flags()
	f.StringArrayVarP(&o.files, "filename", "f", nil, files)
	f.StringVarP(&o.namespace, "namespace", "n", "", "namespace of objects without one (default \"default\")")
}

// addManifest adds the flags of commands that send whole manifests, not only names.
func (o *fileFlags) addManifest(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&o.allowUnknown, "allow-unknown-fields", false, "ignore unknown fields with a warning")
	f.BoolVar(&o.skipOthers, "skip-other-kinds", false, "skip objects that are not services or endpoint slices")
}

// changeFlags are the flags of commands that change services.
type changeFlags struct {
	fileFlags
	manager  string
	expect   invocation.Revision
	validate bool
	wait     invocation.Wait
	ended    bool
	hints    bool // add notes about valid but probably unintended settings
}

func (o *changeFlags) add(cmd *cobra.Command, files string) {
	o.fileFlags.add(cmd, files)
	f := cmd.Flags()
	invocation.ValidateFlag(cmd, &o.validate, "check; change nothing")
	f.StringVar(&o.manager, "manager", "", "act on the services of this program only; each program has its own set")
	o.expect.Flag(cmd, "the revision of the services")
	o.wait.Flag(cmd)
	f.BoolVar(&o.ended, "wait-drained", false, "also wait until no socket sends to a removed backend")
	invocation.RenamedFlag(cmd, "wait-ended", "wait-drained")
}

// onlyFiles refuses arguments: the command takes files with -f.
func onlyFiles(cmd *cobra.Command, a []string) error {
	if a = invocation.WithoutWait(cmd, a); len(a) > 0 {
		return invocation.Usagef("%s takes no argument; name files with -f, as in `%s -f %s`", cmd.CommandPath(),
			cmd.CommandPath(), a[0])
	}
	return nil
}

func applyCommand(inv *invocation.Invocation) *cobra.Command {
	var o changeFlags
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Add or replace services and endpoint slices, all or none",
		Long: fmt.Sprintf(`Add or replace Services and EndpointSlices of this node from files, from the YAML and JSON
files of a directory, or from standard input, all or none, and wait until the kernel enforces them.
The exit code is %d if the load balancer has accepted them but the kernel does not enforce
them (yet).`, invocation.ExitNotReady),
		Args: onlyFiles,
		RunE: func(cmd *cobra.Command, _ []string) error { return apply(cmd.Context(), inv, cmd.InOrStdin(), o) },
	}
	o.add(cmd, "file, directory or - for standard input; may be repeated")
	o.addManifest(cmd)
	return cmd
}

func apply(ctx context.Context, inv *invocation.Invocation, stdin io.Reader, o changeFlags) error {
	if len(o.files) == 0 {
		return invocation.Usagef("nothing to apply: name it with -f FILE, -f DIRECTORY or -f -")
	}
	docs, err := readManifests(inv, o.files, stdin, o.skipOthers)
	if err != nil {
		return err
	}
	o.hints = true
	return makeChange(ctx, inv, o, docs, client.UpsertServices, &lbv1.UpsertServicesRequest{
		Manifests: manifest.Join(docs), DefaultNamespace: o.namespace, ValidateOnly: o.validate,
		AllowUnknownFields: o.allowUnknown, Manager: o.manager, IfRevision: o.expect.Expected(),
	})
}

func deleteCommand(inv *invocation.Invocation) *cobra.Command {
	var o changeFlags
	cmd := &cobra.Command{
		Use:   "delete (-f FILE | [NAMESPACE/]NAME...)",
		Short: "Delete services that were applied with `service apply`",
		Long: fmt.Sprintf(`Delete services of this node by name, or the services and endpoint slices in files, a directory or
standard input, all or none, and wait until the kernel enforces the change. Deleting an
object that does not exist succeeds. If a service is deleted by name, its endpoint slices
stay for a later service of the same name. The exit code is %d if the load balancer has
deleted the services but the kernel still translates them.`, invocation.ExitNotReady),
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, a []string) error {
			return deleteServices(cmd.Context(), inv, cmd.InOrStdin(), invocation.WithoutWait(cmd, a), o)
		},
	}
	o.add(cmd, "file, directory or - for standard input with the objects to delete; may be repeated")
	return cmd
}

// keysNamed returns the keys of the arguments NAME..., or the keys and the documents of the files.
func keysNamed(a []string, o changeFlags, stdin io.Reader) ([]*lbv1.ObjectKey, []manifest.Document, error) {
	var keys []*lbv1.ObjectKey
	switch {
	case len(a) > 0 && len(o.files) > 0:
		return nil, nil, invocation.Usagef("give services either with -f or as arguments, not both")
	case len(a) == 0 && len(o.files) == 0:
		return nil, nil, invocation.Usagef("no service given: want -f FILE or [NAMESPACE/]NAME")
	}
	for _, text := range a {
		name, err := Named(text, o.namespace)
		if err != nil {
			return nil, nil, err
		}
		keys = append(keys, &lbv1.ObjectKey{Kind: kindService, Namespace: name.GetNamespace(), Name: name.GetName()})
	}
	if len(a) > 0 {
		return keys, nil, nil
	}
	docs, err := manifest.Read(o.files, stdin)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range docs {
		key := &lbv1.ObjectKey{Kind: d.Key.GetKind(), Namespace: d.Key.GetNamespace(), Name: d.Key.GetName()}
		if key.GetKind() == "" || key.GetName() == "" {
			return nil, nil, fmt.Errorf("%s has no kind or no metadata.name", d.Place())
		}
		if key.GetKind() != kindService && key.GetKind() != kindSlice {
			return nil, nil, errors.New(d.Problem("is not a service or an endpoint slice"))
		}
		if key.Namespace == "" {
			key.Namespace = o.namespace
		}
		if key.Namespace == "" {
			key.Namespace = defaultNamespace
		}
		keys = append(keys, key)
	}
	return keys, docs, nil
}

func deleteServices(ctx context.Context, inv *invocation.Invocation, stdin io.Reader, a []string, o changeFlags) error {
	keys, docs, err := keysNamed(a, o, stdin)
	if err != nil {
		return err
	}
	for _, name := range a {
		if slices.Contains([]string{"service", "services", "svc", "endpointslice", "endpointslices"}, strings.ToLower(name)) {
			inv.Note(fmt.Sprintf("%q is the name of a kind, but is used as the name of a service", name))
		}
	}
	return makeChange(ctx, inv, o, docs, client.DeleteServices, &lbv1.DeleteServicesRequest{
		Keys: keys, ValidateOnly: o.validate, Manager: o.manager, IfRevision: o.expect.Expected(),
	})
}

// changesOf returns the changes for JSON, with their documents.
func changesOf(changes []*lbv1.ObjectChange, docs []manifest.Document) message.Fact {
	all := make([]message.Object, len(changes))
	for i, ch := range changes {
		all[i] = message.Of(ch)
		if len(docs) == len(changes) {
			all[i].Facts = docs[i].Facts()
		}
	}
	return message.Fact{Key: "changes", Value: all}
}

// warn prints warnings and notes about the changed objects.
func warn(inv *invocation.Invocation, changes []*lbv1.ObjectChange, docs []manifest.Document) {
	for i, ch := range changes {
		where := keyText(ch.GetKey()) + ": "
		if len(docs) == len(changes) {
			where = docs[i].Place() + ": " + where
		}
		for _, field := range ch.GetDroppedFields() {
			fmt.Fprintln(inv.ErrOut, output.Printable("warning: "+where+field+": no such field; it is ignored"))
		}
		for _, text := range ch.GetNotes() {
			fmt.Fprintln(inv.ErrOut, output.Printable("note: "+where+text))
		}
	}
}

// answer is the load balancer's answer to a change.
type answer interface {
	proto.Message
	GetRevision() uint64
	GetChanges() []*lbv1.ObjectChange
}

// makeChange makes a change, waits until the kernel enforces it, and prints the result. docs are the documents with
// the objects, if any.
func makeChange[Q any, R answer](ctx context.Context, inv *invocation.Invocation, o changeFlags,
	docs []manifest.Document, call func(client, context.Context, *Q, ...grpc.CallOption) (R, error), request *Q,
) error {
	began := time.Now()
	r, err := invocation.Ask(ctx, inv, invocation.LoadBalancer, call, request)
	if err != nil {
		return manifest.InDocuments(err, docs)
	}
	localNode := invocation.BeginAskLocalNode(ctx, inv)
	changes := r.GetChanges()
	outcome := invocation.Outcome{
		Revision: r.GetRevision(), ValidateOnly: o.validate, Waited: !o.validate && !o.wait.Off(),
	}
	if outcome.Waited {
		if err := await(ctx, inv, o, r, docs); err != nil {
			outcome.Pending = err.Error()
		}
	}
	outcome.Took = time.Since(began).Round(time.Millisecond)
	outcome.Node = localNode()
	if o.hints {
		addHints(ctx, inv, changes, docs)
	}
	warn(inv, changes, docs)
	facts := append([]message.Fact{changesOf(changes, docs)}, outcome.Facts()...)
	if err := inv.Show(message.Of(r, facts...), func(w io.Writer) {
		for _, ch := range changes {
			output.Row(w, keyText(ch.GetKey()), output.Enum(ch.GetType(), "CHANGE_TYPE_"))
		}
		outcome.Write(w, "the load balancer")
	}); err != nil {
		return err
	}
	return outcome.Err()
}

// concerned returns the services that a change affects. If the service of a slice is unknown, it returns nil, which
// means all services.
func concerned(changes []*lbv1.ObjectChange, docs []manifest.Document) []*lbv1.ServiceKey {
	var keys []*lbv1.ServiceKey
	for i, ch := range changes {
		key := &lbv1.ServiceKey{Namespace: ch.GetKey().GetNamespace(), Name: ch.GetKey().GetName()}
		if ch.GetKey().GetKind() != kindService {
			if len(docs) != len(changes) || docs[i].Service == "" {
				return nil
			}
			key.Name = docs[i].Service
		}
		if !slices.ContainsFunc(keys, func(k *lbv1.ServiceKey) bool { return proto.Equal(k, key) }) {
			keys = append(keys, key)
		}
	}
	return keys
}

// await waits until a datapath is connected and the kernel enforces the revision. If that does not happen in time, it
// returns the reason.
func await(ctx context.Context, inv *invocation.Invocation, o changeFlags, done answer,
	docs []manifest.Document,
) error {
	limit := o.wait.Limit(inv.Timeout)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	request := &lbv1.WaitForRevisionRequest{
		Revision: done.GetRevision(), Services: concerned(done.GetChanges(), docs), Ended: o.ended,
	}
	defer inv.Progress(func() string {
		return fmt.Sprintf("waiting until the kernel enforces revision %d", done.GetRevision())
	})()
	r, err := invocation.Ask(ctx, inv, invocation.LoadBalancer, client.WaitForRevision, request)
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
	// Ignore subscribers that only watch the frontends and program no kernel.
	if len(r.GetEnforcing()) == 0 {
		return errors.New("no datapath is connected to the load balancer; a datapath with the setting " +
			"loadBalancing.mode=off translates no services")
	}
	return nil
}
