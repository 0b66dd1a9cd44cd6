// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

// Exit codes of `service diff`, the same as diff(1).
const (
	exitDiffers = invocation.ExitFailed
	exitTrouble = 2
)

func diffCommand(inv *invocation.Invocation) *cobra.Command {
	var (
		o       fileFlags
		manager string
	)
	cmd := &cobra.Command{
		Use:   "diff -f FILE",
		Short: "Show which objects `service apply` would change",
		Long: fmt.Sprintf(`Show which Services and EndpointSlices in files are new or differ from accepted ones, with
warnings and notes. Nothing is changed. The exit code is 0 if nothing would change, %d if
something would, %d on errors.`, exitDiffers, exitTrouble),
		Example: `  sluice service diff -f web.yaml`,
		Args:    onlyFiles,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := diff(cmd.Context(), inv, cmd.InOrStdin(), o, manager)
			if err != nil && !errors.Is(err, invocation.ErrReported) {
				return &invocation.ExitError{Code: exitTrouble, Err: err}
			}
			return err
		},
	}
	o.add(cmd, "file, directory or - for standard input; may be repeated")
	o.addManifest(cmd)
	cmd.Flags().StringVar(&manager, "manager", "",
		"act on the services of this program only; each program has its own set")
	return cmd
}

func diff(ctx context.Context, inv *invocation.Invocation, stdin io.Reader, o fileFlags, manager string) error {
	if len(o.files) == 0 {
		return invocation.Usagef("nothing to compare: name it with -f FILE, -f DIRECTORY or -f -")
	}
	docs, err := readManifests(inv, o.files, stdin, o.skipOthers)
	if err != nil {
		return err
	}
	request := &lbv1.UpsertServicesRequest{
		Manifests: manifest.Join(docs), DefaultNamespace: o.namespace, ValidateOnly: true, AllowUnknownFields: o.allowUnknown,
		Manager: manager,
	}
	r, err := invocation.Ask(ctx, inv, invocation.LoadBalancer, client.UpsertServices, request)
	if err != nil {
		return manifest.InDocuments(err, docs)
	}
	warn(inv, r.GetChanges(), docs)
	changed := slices.DeleteFunc(slices.Clone(r.GetChanges()), func(c *lbv1.ObjectChange) bool {
		return c.GetType() == lbv1.ChangeType_CHANGE_TYPE_UNCHANGED
	})
	validateOnly := message.Fact{Key: "validateOnly", Value: true}
	if err := inv.Show(message.Of(r, changesOf(r.GetChanges(), docs), validateOnly), func(w io.Writer) {
		for _, c := range changed {
			output.Row(w, keyText(c.GetKey()), "would be "+output.Enum(c.GetType(), "CHANGE_TYPE_"))
		}
		if len(changed) == 0 {
			fmt.Fprintln(w, "Nothing would change.")
		}
		if only := invocation.AskLocalNode(ctx, inv).Only(); only != "" {
			fmt.Fprintln(w, "\n"+output.Printable("Compared: "+only+"."))
		}
	}); err != nil {
		return err
	}
	if len(changed) > 0 {
		return invocation.ErrReported
	}
	return nil
}
