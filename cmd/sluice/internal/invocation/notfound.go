// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

// NotFound returns the error for a name that matches no object of the kind. list is the command that lists the objects,
// for example "service list".
func NotFound(kind, name, list string) error {
	return fmt.Errorf("no %s %s; see `sluice %s`", kind, output.Printable(name), list)
}

// OrNotFound replaces the message of err by the message of NotFound if the code of err is NotFound. It keeps code and
// details. hints are appended to the message.
func OrNotFound(err error, kind, name, list string, hints ...string) error {
	if status.Code(err) != codes.NotFound {
		return err
	}
	said := status.Convert(err).Proto()
	said.Message = NotFound(kind, name, list).Error() + strings.Join(hints, "")
	return status.ErrorProto(said)
}
